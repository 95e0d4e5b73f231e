"""Streams one answer over gRPC, with messages from reflection: python examples/grpc_client.py [QUESTION]"""

import os
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

question = " ".join(sys.argv[1:]) or "What is the capital of France?"
with grpc.insecure_channel(os.environ.get("GRPC_ADDRESS", "127.0.0.1:8001")) as channel:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindServiceByName("headrace.v1.Inference").FindMethodByName("Generate")
    request_type, event_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    generate = channel.unary_stream(
        "/headrace.v1.Inference/Generate",
        request_serializer=request_type.SerializeToString,
        response_deserializer=event_type.FromString,
    )
    request = request_type(model="smollm2", chat={"messages": [{"role": "user", "content": question}]})
    for event in generate(request, timeout=60):
        print(event.text, end="", flush=True)
print()
