"""The admin API of a gateway: health, readiness, metrics, and the fleet's endpoints and routes. See `app`.

What its server and its clients must agree on stands here, where importing it loads nothing else.
"""

TOKEN_HEADER = "x-headrace-admin-token"
ENDPOINTS = "/admin/v1/endpoints"
ROUTES = "/admin/v1/routes"
