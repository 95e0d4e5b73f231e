"""Whether the Ray to join needs a token: its GCS is called without one."""

import grpc

from headrace_cluster.errors import OpenRayError
from headrace_proto.channel_options import NO_PROXY

ANSWER_SECONDS = 10.0
# Reads nothing and changes nothing. An empty message is a valid request.
_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
# Without an answer nothing is known: of a GCS with Ray's own TLS, or of one that ended, which joining then reports.
_NO_ANSWER = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


def check_token(address: str) -> None:
    """address: host:port of a GCS. Raises OpenRayError if it answers a call without a token."""
    with grpc.insecure_channel(address, options=NO_PROXY) as channel:
        call = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)
        try:
            call(b"", timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            if error.code() in {grpc.StatusCode.UNAUTHENTICATED, *_NO_ANSWER}:
                return
    raise OpenRayError(
        f"the Ray at {address} needs no token: any process that reaches its ports can run code on every node. Start "
        "it with RAY_AUTH_MODE=token and a token, or pass --ray-no-auth if the network itself restricts access"
    )
