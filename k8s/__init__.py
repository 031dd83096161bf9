"""The cluster plane: what engines there are in a Kubernetes cluster.

`mirror` keeps a copy of what the API server has, `endpoints` makes of pods (`pods`) and nodes (`nodes`) what gateways
route to, `names` lists what of their labels, annotations and taints counts, `publication` what gateways are told. All
of that is pure. The I/O is at the edge: `api` is the only module that knows the Kubernetes client, `reflector` keeps a
mirror true, `election` finds a leader, `discovery` brings it all together, and `status_page` says how it is.
"""
