"""The cluster plane: what engines there are in a Kubernetes cluster.

`mirror` keeps a copy of what the API server has, `endpoints` makes of pods (`pods`) and nodes (`nodes`) what gateways
route to, `names` lists what of their labels, annotations and taints counts. All of it is pure: the I/O is at the edge.
"""
