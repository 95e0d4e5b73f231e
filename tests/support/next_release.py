"""A copy of this release's packages that is the next release: its contract version is one higher, and each message
between processes has a field that this release does not know. To it, this release is the release before.
"""

import os
import re
import shutil
from pathlib import Path

from support.child_environment import TESTS

ROOT = TESTS.parent
PACKAGES = [f"{name}/headrace_{name}" for name in ("cluster", "kernels", "proto", "router", "worker")]
VERSION = re.compile(r"^CONTRACT_VERSION = (\d+)$", re.MULTILINE)
NEW_FIELDS = '''
"""Fields of the next release."""

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

NAME, NUMBER = "of_the_next_release", 1000


def with_new_fields(serialized):
    """The descriptor of a file, with one more field in each message."""
    file = FileDescriptorProto.FromString(serialized)
    for message in file.message_type:
        field = message.field.add(name=NAME, number=NUMBER, json_name=NAME)
        field.type, field.label = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.LABEL_OPTIONAL
    return file.SerializeToString()


def serialize(message):
    """As it is sent, with the new field set in it and in every nested message."""
    _fill(message)
    return message.SerializeToString()


def _fill(message):
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for nested in value if field.is_repeated else (value,):
                _fill(nested)
    if NAME in message.DESCRIPTOR.fields_by_name:
        setattr(message, NAME, "new")
'''


class NextRelease:
    """Processes with `environment` are of it."""

    def __init__(self, folder: Path) -> None:
        """folder: gets the packages."""
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
        proto = folder / "headrace_proto"
        (proto / "new_fields.py").write_text(NEW_FIELDS)
        source, count = VERSION.subn(lambda found: f"CONTRACT_VERSION = {int(found[1]) + 1}", _read(proto, "__init__"))
        assert count == 1
        (proto / "__init__.py").write_text(source)
        for name in ("control_pb2", "replica_pb2"):
            source = _read(proto, name)
            source = re.sub(r"AddSerializedFile\((b'.*')\)", r"AddSerializedFile(with_new_fields(\1))", source)
            assert "with_new_fields" in source
            (proto / f"{name}.py").write_text(f"from headrace_proto.new_fields import with_new_fields\n{source}")
            source = _read(proto, f"{name}_grpc")
            source, count = re.subn(r"_serializer=[\w.]+\.SerializeToString", "_serializer=serialize", source)
            assert count > 5
            (proto / f"{name}_grpc.py").write_text(f"from headrace_proto.new_fields import serialize\n{source}")
        self.environment = {"PYTHONPATH": os.pathsep.join((str(folder), str(TESTS)))}


def _read(folder: Path, module: str) -> str:
    return (folder / f"{module}.py").read_text()
