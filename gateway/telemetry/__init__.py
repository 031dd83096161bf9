"""What operators are told of single requests: a line of the access log, a trace.

- `record`: what is written down of a request on its way;
- `observer`: is told when a request begins and ends, and tells who wants to know;
- `access_log`: one JSON line for each request;
- `log_file`: where the lines go;
- `trace`: what is to become a request's spans;
- `tracing`: which requests are traced, the spans, and their export.

Where neither is wanted there is no observer, and all that a request pays is to find that out.
"""
