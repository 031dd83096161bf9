"""`headrace bench grpc`: what the KServe gRPC front costs, beside a proxy that only moves bytes.

Nobody can forward a gRPC message in Python for less than grpc.aio does, so its price is the unit: the gateway's front
is compared with a program of a hundred lines (`bare_proxy`) in front of the same stand-in engine (`engine`), under the
same load (`load`) with the same messages (`messages`). What is above 1 is what routing, limits and names cost.
"""
