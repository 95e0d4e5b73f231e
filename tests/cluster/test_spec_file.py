"""The spec file of a running controller: what a change of it does, and what a wrong one does not."""

import os
from pathlib import Path

import pytest

from headrace_cluster.controller.spec_file import SpecFile, digest
from headrace_cluster.errors import SpecError
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.settings import build_spec


class Mounted:
    """A ConfigMap as the kubelet mounts it: a link to a file below another link, which is replaced."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._versions = 0
        self.path = folder / "cluster.yaml"
        self.write(text)
        self.path.symlink_to(Path("..data") / "cluster.yaml")
        self.refused: list[str] = []
        self.errors: list[Exception] = []  # of the next checks
        self.file = SpecFile(self.path, digest(self.path), self.build(), self.build, self.check)

    def write(self, text: str) -> None:
        self._versions += 1
        version = self._folder / f"..{self._versions}"
        version.mkdir()
        (version / "cluster.yaml").write_text(text)
        link = self._folder / "..new"
        link.symlink_to(version.name)
        os.replace(link, self._folder / "..data")

    def build(self) -> ClusterSpec:
        return build_spec({"max_num_seqs": 4}, self.path, {})

    def check(self, spec: ClusterSpec) -> ClusterSpec:
        if self.errors:
            raise self.errors.pop()
        if any(model.source in self.refused for model in spec.models):
            raise SpecError("there is no such model")
        return spec


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path, "models: [{source: smollm2}]")


def test_models_are_read_again_with_the_flags_of_the_start(mounted: Mounted) -> None:
    assert mounted.file.reread() is None
    mounted.write("models: [{source: smollm2, replicas: 3}]")
    found = mounted.file.reread()
    assert found is not None
    assert (found[1].models[0].replicas, found[1].models[0].max_num_seqs, mounted.file.problem) == (3, 4, "")
    assert mounted.file.reread() is None, "once"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [", "is not YAML"),
        ("models: [{source: smollm2, replicsa: 3}]", "unknown key 'models[0].replicsa'"),
        ("models: [{source: nowhere}]", "there is no such model"),
        ("cluster: another", "another cluster, 'another'"),
    ],
)
def test_a_wrong_file_changes_nothing_and_is_a_problem_until_it_is_right(
    mounted: Mounted, text: str, words: str
) -> None:
    mounted.refused = ["nowhere"]
    for _ in range(2):
        mounted.write(text)
        assert mounted.file.reread() is None and mounted.file.reread() is None
        assert words in mounted.file.problem and "what it had before stays" in mounted.file.problem
        mounted.write("models: [{source: smollm2}]  # again")
        assert mounted.file.reread() is not None and mounted.file.problem == ""


def test_other_sections_take_effect_with_the_next_start(mounted: Mounted) -> None:
    mounted.write("models: [{source: smollm2, replicas: 2}]\ncontrol: {port: 9004}\nhealth: {drain_seconds: 30}")
    found = mounted.file.reread()
    assert found is not None and found[1].models[0].replicas == 2 and found[1].health.drain_seconds == 5
    assert mounted.file.problem.startswith("control, health of the spec file")


def test_a_file_that_could_not_be_read_or_checked_is_read_again(mounted: Mounted) -> None:
    mounted.path.unlink()
    assert mounted.file.reread() is None and "cannot be read" in mounted.file.problem
    mounted.path.symlink_to(Path("..data") / "cluster.yaml")
    assert mounted.file.reread() is not None and mounted.file.problem == ""
    mounted.errors = [OSError("the network is down")]
    mounted.write("models: [{source: smollm2, replicas: 3}]")
    assert mounted.file.reread() is None and "the network is down" in mounted.file.problem
    found = mounted.file.reread()
    assert found is not None and found[1].models[0].replicas == 3 and not mounted.file.problem
