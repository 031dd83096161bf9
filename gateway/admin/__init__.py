"""The admin API of a gateway: health, readiness, metrics, and the fleet's endpoints and routes. See `app`."""
