"""The admin API of a gateway: health, readiness, metrics, and the fleet's endpoints, routes and tenants. See `app`.

What its server and its clients must agree on stands here, where importing it loads nothing else.
"""

TOKEN_HEADER = "x-headrace-admin-token"
MISSING_TOKEN = "missing_admin_token"
WRONG_TOKEN = "invalid_admin_token"
TOKEN_NOT_SET = "admin_token_not_set"
UNKNOWN_NAMES = ("endpoint_not_found", "route_not_found", "tenant_not_found", "request_not_found", "logger_not_found")
"""Error codes; of a 404 only these: any other is about the path."""
ENDPOINTS = "/admin/v1/endpoints"
ROUTES = "/admin/v1/routes"
TENANTS = "/admin/v1/tenants"
REQUESTS = "/admin/v1/requests"
LOG_LEVELS = "/admin/v1/log-levels"
CONFIGURATION = "/admin/v1/configuration"
RELOAD = "/admin/v1/reload"
OPENAPI = "/admin/v1/openapi.json"
