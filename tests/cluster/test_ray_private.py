"""What `ray/private.py` takes from inside Ray is there in the installed release; `test_live_ray.py` uses it."""

import inspect

from ray._private import services, utils, worker
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.experimental import internal_kv


def test_the_installed_ray_has_what_the_wrapper_uses() -> None:
    assert {"ray_params", "head", "shutdown_at_exit", "spawn_reaper", "ray_init_cluster"} <= set(_parameters(Node))
    assert {"check_alive", "allow_graceful"} <= set(_parameters(Node.kill_all_processes))
    assert all(hasattr(Node, name) for name in ("gcs_address", "webui_url", "dead_processes"))
    assert all(name in inspect.getsource(Node) for name in ("self.all_processes", "self.kernel_fate_share"))
    assert {"temp_dir", "dashboard_host"} <= set(_parameters(RayParams))
    assert {"command", "process_type", "fate_share"} <= set(_parameters(services.start_ray_process))
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)
    assert "print_to_stdstream" in inspect.getsource(worker) and "set_sigterm_handler" in inspect.getsource(worker)
    assert callable(worker.print_to_stdstream) and callable(utils.set_sigterm_handler)
    for call in (internal_kv._internal_kv_get, internal_kv._internal_kv_put, internal_kv._internal_kv_del):
        assert {"key", "namespace"} <= set(_parameters(call))


def _parameters(call: object) -> list[str]:
    assert callable(call)
    return list(inspect.signature(call).parameters)
