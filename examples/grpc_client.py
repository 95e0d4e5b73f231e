"""Streams one answer over gRPC, with messages from reflection: python examples/grpc_client.py [QUESTION]"""

import os
import sys
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class SendKey(grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the API key to each call, those of reflection included."""

    def __init__(self, key: str) -> None:
        self._metadata = [("authorization", f"Bearer {key}")]

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


question = " ".join(sys.argv[1:]) or "What is the capital of France?"
with grpc.insecure_channel(os.environ.get("GRPC_ADDRESS", "127.0.0.1:8001")) as channel:
    if key := os.environ.get("HEADRACE_API_KEY"):
        channel = grpc.intercept_channel(channel, SendKey(key))
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("headrace.v1.Inference").FindMethodByName("Generate")
    request_type, event_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    generate = channel.unary_stream(
        "/headrace.v1.Inference/Generate",
        request_serializer=request_type.SerializeToString,
        response_deserializer=event_type.FromString,
    )
    request = request_type(model="smollm2", chat={"messages": [{"role": "user", "content": question}]})
    event: Any  # its class comes from reflection
    for event in generate(request, timeout=60):
        print(event.text, end="", flush=True)
print()
