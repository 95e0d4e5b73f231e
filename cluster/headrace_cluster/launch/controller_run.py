"""`headrace controller`: the controller's process, alone in a Ray that others started or as a child of `serve`."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec
import structlog

from headrace_base.address import host_port
from headrace_base.cluster_member import SecretFile
from headrace_base.errors import HeadraceError
from headrace_base.logs import LogConfig, add_log_file, configure_logs
from headrace_cluster.controller.spec_file import SpecFile
from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.revisions import moved_note, resolved_revisions
from headrace_cluster.core.view import ClusterView, ControllerConfig
from headrace_cluster.errors import ControllerTakenError, RayLostError, SpecError
from headrace_cluster.launch.banner import attached_note, show_ready, starting
from headrace_cluster.launch.display import ClusterDisplay, show_failure, show_message, use_log_format
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.launch.signals import STOP_ALL
from headrace_cluster.launch.start_checks import check_local, check_models, check_room, check_start
from headrace_cluster.local.processes import set_parent_death_signal
from headrace_cluster.local.run_logs import log_path, make_run_folder
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec

log = structlog.get_logger(__name__)

SHOW_SECONDS = 0.5  # between two looks at what is to be shown


def run_controller(
    spec: ClusterSpec,
    file: SpecFile | None = None,
    replica_class: str = REPLICA_CLASS,
    *,
    take_over: bool = False,
) -> NoReturn:
    """Runs in the Ray at `ray.address` until a signal ends this process, or an operator the cluster; ends the process.

    take_over: see Controller.

    However it ends, replicas and streams go on, and the next controller goes on with them. Raises SpecError.
    """
    status = 1
    try:
        stopped = _control(spec, file, replica_class, take_over)
        goes_on = f"ended; the cluster goes on: the same command takes it up, `{program_name()} stop` then ends it"
        show_message("stopped" if stopped else goes_on)
        status = 0
    except SpecError:
        raise
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        show_failure(error)
    os._exit(status)  # without Ray's exit handlers, which may wait for a GCS


def _control(spec: ClusterSpec, file: SpecFile | None, replica_class: str, take_over: bool) -> bool:
    """Whether an operator has ended the cluster. Raises HeadraceError."""
    use_log_format(spec.logs.format)
    began = time.monotonic()
    if spec.control.secret_file is None:
        raise SpecError(
            "the controller needs the cluster's secret, which routers get, too: --secret-file FILE, a file with 32 "
            "random characters (openssl rand -hex 16 > FILE; chmod 600 FILE)"
        )
    secret_path = spec.control.secret_file
    secret_file = SecretFile(secret_path)
    stop_requests: list[int] = []  # before this controller acts; without a handler the signal would end the process
    signal.signal(STOP_ALL, lambda number, _: stop_requests.append(number))
    with contextlib.ExitStack() as stack:
        show_message(starting(spec.models))
        display = ClusterDisplay()
        record = ServerRecord(spec, with_router=False, detaches=True)
        stack.callback(record.path.unlink, missing_ok=True)
        record.save()
        warn = partial(show_message, level="warning")
        display.show_stage("model", "checking its files")
        checked = check_start(spec, warn, with_router=False)
        display.show_stage("Ray", f"joining {spec.ray.address}")
        from headrace_cluster.ray import connection
        from headrace_cluster.ray.ray_controller import Controller, prepare

        dashboard = connection.join_when_up(checked, warn)
        logs = ""
        if spec.logs.files:
            folder = make_run_folder(spec.cluster, spec.admin.port)
            logs, path = str(folder), str(log_path(folder, "controller"))
            add_log_file(LogConfig("controller", path=path, format=spec.logs.format))
            show_message(f"logs: {logs}")
            record.update(log_folder=logs)
        found = resolved_revisions(spec, checked)
        leased, lease, words = prepare(checked, found)
        for name, now in found.items():
            if note := moved_note(now, words.revisions[name]):
                show_message(note, "warning")

        async def run() -> bool:
            controller = Controller(
                leased,
                lease,
                words,
                secret_file,
                record.state.admin_key,
                log_folder=logs,
                replica_class=replica_class,
                spec_file=file,
                check=check_spec,
                take_over=take_over,
            )
            opened = await controller.open()
            if note := attached_note(opened):
                show_message(note)
            record.add_admin(opened.admin_port)
            record.update(
                control_address=host_port(opened.control_host, opened.control_port),
                secret_file=str(secret_path),
                ray_dashboard=dashboard,
                starting=False,
            )
            _handle_signals(controller)
            if stop_requests:
                controller.stop()
            await _show(controller, record, leased, display, began)
            if controller.node_lost:
                raise RayLostError(
                    f"this node has left the Ray at {spec.ray.address}: start the controller again on a node of it; "
                    "what serves goes on"
                )
            if controller.taken:
                raise ControllerTakenError(
                    f"another controller has taken over the cluster '{spec.cluster}', which goes on; this one ends"
                )
            if controller.stop_requested:
                show_message("stopping")
                await controller.close()
            return controller.stop_requested

        return asyncio.run(run())


def run_from_stdin(parent: int) -> None:
    """The controller of a `serve`: its ControllerConfig comes through a pipe once Ray is up. Ends the process."""
    set_parent_death_signal(parent)
    from headrace_cluster.ray import connection
    from headrace_cluster.ray.ray_controller import Controller, prepare

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ControllerConfig)
    views = os.fdopen(os.dup(1), "wb")  # for the parent; nothing else is to write there
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    spec = ClusterSpec.model_validate_json(config.spec)
    path = str(log_path(Path(config.log_folder), "controller"))
    configure_logs(LogConfig("controller", path=path, format=spec.logs.format, stderr_level="error"))

    async def run() -> None:
        controller = Controller(
            *prepare(spec, {}),
            SecretFile(Path(config.secret_file)),
            config.admin_key,
            log_folder=config.log_folder,
            replica_class=config.replica_class,
            supervised=True,
            check=lambda spec: check_local(spec, log.warning),
            check_room=check_room,
        )
        await controller.open()
        _handle_signals(controller)
        while not await _ended(controller):
            await asyncio.to_thread(_tell, views, controller.view())

    status = 0
    try:
        connection.join(spec)
        asyncio.run(run())
    except Exception as error:
        is_known = isinstance(error, HeadraceError)
        log.error(str(error) if is_known else f"unexpected {error!r}", exc_info=None if is_known else error)
        status = 1
    os._exit(status)


def _tell(pipe: IO[bytes], view: ClusterView) -> None:
    """One line. It blocks while the parent does not read."""
    pipe.write(msgspec.json.encode(view) + b"\n")
    pipe.flush()


def check_spec(spec: ClusterSpec) -> ClusterSpec:
    """Checks other models: their files, where this machine has them, and their commits. Raises a HeadraceError."""
    return check_models(spec, log.warning)[0]


def _handle_signals(controller: Any) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, controller.ended.set)
    loop.add_signal_handler(STOP_ALL, controller.stop)


async def _show(
    controller: Any, record: ServerRecord, spec: ClusterSpec, display: ClusterDisplay, began: float
) -> None:
    """Shows what happens until this process is to end."""
    while not (view := controller.view()).ready and not await _ended(controller):
        display.show_start(view)
    if view.ready:
        show_ready(record.state, view, spec, time.monotonic() - began)
    while not await _ended(controller):
        display.show_changes(controller.view())


async def _ended(controller: Any) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHOW_SECONDS):
            await controller.ended.wait()
    return bool(controller.ended.is_set())
