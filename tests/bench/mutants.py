"""One-line faults, each put into a copy of the checkout, and the tests that have to find them.

``python -m tests.bench.mutants`` tries all faults, ``--only NAME`` one, ``--list`` none. Each fault
names the tests that have to find it. If you rewrite the code of a fault, write the fault anew for
the new code: a fault whose old text does not occur exactly once in its file fails the run, and an
ordinary test.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 100.0
PATIENCE_SECONDS = 6.0


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: The fault in a few words.
        file: File of the fault, below ``aiosync/``.
        old: Text that the fault replaces; it occurs once in the file.
        new: Text that the fault puts there.
        tests: Arguments of pytest for the tests that have to find the fault.
        patience: Seconds that a check waits for something, which the fault may keep from happening.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    patience: float = PATIENCE_SECONDS

    def fits(self, root: Path = ROOT) -> bool:
        """Return True if the fault can be put in."""
        path = root / "aiosync" / self.file
        return path.exists() and path.read_text().count(self.old) == 1


def contract(*names: str) -> str:
    """Return the tests of some checks of the contract, over shared memory, pipes and TCP."""
    return f"tests/contract/test_contract.py -k '{' or '.join(names)}'"


def conformance(*names: str) -> str:
    """Return the tests of some checks of the transports."""
    return f"tests/conformance/test_transports.py -k '{' or '.join(names)}'"


MUTANTS = [
    # -- the guard and applying
    Mutant(
        "a read is not counted",
        "receiver/guard.py",
        "self._open[thread] = [read]",
        "pass",
        contract("update_waits_for_reader"),
    ),
    Mutant(
        "an update is applied while somebody reads",
        "receiver/guard.py",
        "            if self._open or self._applying is not None:\n                self._sweep()",
        "            if self._applying is not None:\n                self._sweep()",
        contract("update_waits_for_forward"),
    ),
    Mutant(
        "a read begins in the middle of an apply",
        "receiver/guard.py",
        "if self._applying is not None and self._applying[0] != thread:",
        "if False:",
        contract("read_waits_for_update"),
    ),
    Mutant(
        "a block has the version that waited for its end",
        "receiver/reads.py",
        "self._guard.leave(found[1], thread=found[0])\n",
        "self._guard.leave(found[1], thread=found[0])\n        self._held = self._guard.held\n",
        contract("version_of_a_block"),
    ),
    Mutant(
        "a forward inside of a block counts beside it",
        "receiver/guard.py",
        "computes\n                and self.read_versions.runs is not None\n"
        "                and reads\n                and not self._is_inside(thread)\n",
        "self.read_versions.runs is not None\n                and reads\n",
        contract("spans"),
    ),
    Mutant(
        "what another run made counts as this one's",
        "receiver/read_versions.py",
        "        if known != epoch:",
        "        if False:",
        contract("other_trainer"),
    ),
    Mutant(
        "an observer that raises is told again",
        "_meter.py",
        "        self.remove(observer)\n        text",
        "        text",
        contract("observer_raises"),
    ),
    Mutant(
        "workers that take slots are never behind",
        "sender/worker_link.py",
        "behind = self.is_behind or not self.outbox.is_idle",
        "behind = not self.outbox.is_idle",
        contract("bounded_lag"),
    ),
    Mutant(
        "the trace stays where the slot is written",
        "transports/shared_memory/slots.py",
        "                ids = bytes.fromhex(trace[3:35] + trace[36:52])\n",
        "",
        contract("observers"),
    ),
    Mutant(
        "a refused version counts as applied",
        "receiver/applier.py",
        "self._switch_to(staged) if staged.taken else error",
        "self._switch_to(staged)",
        contract("refused_names"),
    ),
    Mutant(
        "what a refusal changed is not undone",
        "tensors/apply.py",
        "for step in reversed(undo):",
        "for step in ():",
        contract("refused_halfway"),
    ),
    Mutant(
        "a buffer of the model is not copied",
        "tensors/apply.py",
        "        if plan.copies.tensors:\n",
        "        if False:\n",
        contract("everything_travels"),
    ),
    Mutant(
        "another dtype is cast in silence",
        "tensors/matching.py",
        "if tensor.dtype is not dtype and (exact or not castable):",
        "if False:",
        contract("refused_names"),
    ),
    Mutant(
        "a model goes on viewing a slot that its worker left",
        "tensors/apply.py",
        "tensor.data = tensor.data.clone()",
        "pass",
        contract("nothing_is_aliased"),
    ),
    # -- the snapshot
    Mutant(
        "weights that moved are copied from where they were",
        "tensors/flatten.py",
        "or program.addresses != addresses",
        "or False",
        contract("changed_source"),
    ),
    Mutant(
        "large tensors are copied only the first time",
        "tensors/flatten.py",
        "        if self._large:\n",
        "        if False:\n",
        contract("several_workers"),
    ),
    Mutant(
        "what was borrowed is not copied when the send is over",
        "sender/sender.py",
        "            if still_copying is not None:",
        "            if False:\n",
        "tests/schemes/test_ray.py --apart -m apart -k late_joiner_gets_what_was_sent",
        # A cluster has to start.
        patience=40.0,
    ),
    # -- slots of shared memory
    Mutant(
        "a slot is written while a worker reads it",
        "transports/shared_memory/slots.py",
        "            fcntl.fcntl(self.segment.lock_fd, SET_LOCK, _EXCLUSIVE[self.index])",
        "            pass",
        "tests/schemes/test_publishing.py -k written_over",
    ),
    Mutant(
        "a slot that was left is never free again",
        "transports/shared_memory/reader.py",
        "            fcntl.fcntl(self._lock_fd, SET_LOCK, UNLOCKED[index])\n        self.locked",
        "            pass\n        self.locked",
        contract("memory_stays"),
    ),
    Mutant(
        "memory of an update that was reported late is given back twice",
        "receiver/receiver.py",
        "            if staged.reported:",
        "            if False:",
        "tests/sync/test_interrupts.py -k splits_no_update",
    ),
    Mutant(
        "a process is forked in the middle of an update",
        "receiver/model.py",
        "            with FORKING if on_cpu else contextlib.nullcontext():",
        "            with contextlib.nullcontext():",
        "tests/sync/test_fork.py -k splits",
    ),
    Mutant(
        "a slot is left that a state_dict() still views",
        "receiver/update_reader.py",
        "        kept = not flat.exclusive()",
        "        kept = False",
        contract("kept_values"),
    ),
    Mutant(
        "workers that do not compute are never rung",
        "sender/sender.py",
        "        if self._late_timer is None and self.copier.arena is not None:\n",
        "        if False:\n",
        "tests/schemes/test_publishing.py -k follows_soon",
    ),
    Mutant(
        "a forward does not look at the word",
        "receiver/guard.py",
        "return self._pending or (words is not None and words[0] != self.seen)",
        "return self._pending",
        "tests/schemes/test_publishing.py -k stopped_worker",
    ),
    Mutant(
        "reads that overlap are not told of",
        "receiver/guard.py",
        "        if self.words is not None and not reads and self._open:",
        "        if False:",
        "tests/schemes/test_publishing.py -k overlap",
    ),
    # -- versions, and updates on their way
    Mutant(
        "the same version twice is news",
        "protocol/version_order.py",
        "if epoch == self.newest_epoch and version <= self.newest:",
        "if epoch == self.newest_epoch and version < self.newest:",
        "tests/unit/test_ledger.py",
    ),
    Mutant(
        "versions of another trainer are compared",
        "protocol/version_order.py",
        "if epoch == self.newest_epoch and version <= self.newest:",
        "if version <= self.newest:",
        contract("other_trainer"),
    ),
    Mutant(
        "the oldest update wins",
        "sender/update_queue.py",
        "        self.groups = [*alone, (*together, *group)]",
        "        self.groups = [*self.groups, group]",
        contract("slow_worker"),
    ),
    Mutant(
        "what is in flight is forgotten when the link ends",
        "sender/outbox.py",
        "versions = [*self.in_flight, *(",
        "versions = [*(",
        contract("killed_worker", "close_wakes"),
    ),
    Mutant(
        "an answer to another epoch counts",
        "sender/outbox.py",
        "if ack.epoch != self.epoch or version not in flying:",
        "if version not in flying:",
        "tests/unit/test_outbox.py",
    ),
    Mutant(
        "a part takes the place of another that waits",
        "sender/update_queue.py",
        "        needed = still_needed(older, group)\n",
        "        needed = list[Snapshot]()\n",
        contract("parts"),
    ),
    # -- the send and its report
    Mutant(
        "a worker that refused counts as one that applied",
        "sender/outbox.py",
        "self.failed[worker_idx] = outcome.error",
        "self.acked.add(worker_idx)",
        contract("refused_shape"),
    ),
    Mutant(
        "a dead worker is an error of every send",
        "sender/sender.py",
        "            workers.records[idx].report()\n        if error is None:",
        "            pass\n        if error is None:",
        contract("dead_worker"),
    ),
    Mutant(
        "a send has no deadline",
        "sender/sender.py",
        "                send.time_out()\n",
        "                return\n",
        contract("send_timeout"),
    ),
    Mutant(
        "a send that closing ends looks like a failure of workers",
        "sender/sender.py",
        "        elif workers.closed:",
        "        elif False:",
        contract("close_wakes"),
    ),
    # -- workers that come, go, and come again
    Mutant(
        "a part that stays goes alone where an older one was replaced",
        "sender/update_queue.py",
        "if len(kept) == len(each) and not (replaced and parts):",
        "if len(kept) == len(each):",
        "tests/schemes/test_sending.py -k never_had",
    ),
    Mutant(
        "a late joiner gets only the newest part",
        "sender/update_queue.py",
        "if not each.names <= newer:",
        "if False:",
        contract("parts_for_a_late_joiner"),
    ),
    Mutant(
        "an index is given to two workers",
        "sender/admission.py",
        "return record.pid if any(map(is_up, links)) else None",
        "return None",
        contract("index_taken"),
    ),
    Mutant(
        "a worker that came again stays lost",
        "sender/registry.py",
        "self.links = dict(sorted((self.links | {idx: link}).items()))",
        "self.links = {**self.links}",
        contract("dead_worker"),
    ),
    Mutant(
        "a worker of another model is let in",
        "rendezvous/handshake.py",
        "if hello.model_id != model_id:",
        "if False:",
        contract("other_model"),
    ),
    Mutant(
        "a worker that asks for a later version gets what there is",
        "sender/registry.py",
        "if version < link.wanted:",
        "if False:",
        contract("pull"),
    ),
    Mutant(
        "the first attempt to dial is the last",
        "rendezvous/dialer.py",
        "if final(exc):",
        "if True:",
        contract("worker_before_trainer"),
    ),
    Mutant(
        "a lost link is not replaced",
        "schemes/worker.py",
        "else functools.partial(kept.reconnect, seconds=lasting),",
        "else None,",
        contract("cut_link"),
    ),
    Mutant(
        "a process that ends before it connects is waited for",
        "sender/worker_deaths.py",
        "        self._on_end()\n",
        "        pass\n",
        contract("dead_before_connect"),
    ),
    Mutant(
        "a scheme that is closed goes on connecting",
        "schemes/lifecycle.py",
        "task is not None and not self.inherited and task is not current_task():",
        "False:",
        contract("close_wakes"),
    ),
    Mutant(
        "a copy has a role",
        "schemes/base.py",
        "        self._begin(model_id, worker_idx)\n\n    @in_every_state",
        "        self._begin(model_id, worker_idx)\n        self._life.side = True\n\n"
        "    @in_every_state",
        contract("pickling"),
    ),
    # -- the wire
    Mutant(
        "any proof of the token is good",
        "wire/auth.py",
        "if known is not None and hmac.compare_digest(message.mac, expected) and fresh:",
        "if known is not None and fresh:",
        "tests/unit/test_auth.py",
    ),
    Mutant(
        "a proof that is said back is good",
        "wire/auth.py",
        "data = _PREFIX + role + ",
        "data = _PREFIX + ",
        "tests/unit/test_auth.py",
    ),
    Mutant(
        "a frame may announce any payload",
        "wire/frames.py",
        "if payload_nbytes > limits.max_payload_nbytes:",
        "if False:",
        conformance("limit"),
    ),
    Mutant(
        "a damaged header is taken",
        "wire/frames.py",
        "if zlib.crc32(header) != crc:",
        "if False:",
        "tests/unit/test_framing.py",
    ),
    Mutant(
        "a damaged chunk is taken",
        "protocol/assembly.py",
        "if found != update.checksum:",
        "if False:",
        "tests/unit/test_chunks.py",
    ),
    Mutant(
        "a send that was cut in the middle leaves the link open",
        "transports/framed_link.py",
        'self.fail(TransportBroken(f"a send to {self.name} was cut in mid-message"))',
        "self.check()",
        conformance("cancel"),
    ),
    Mutant(
        "a worker's span has no parent",
        "metrics/telemetry.py",
        '{} if event.trace is None else {"traceparent": event.trace}',
        "{}",
        "tests/metrics/test_telemetry.py",
    ),
    Mutant(
        "of several receivers the newest version is shown",
        "metrics/collector.py",
        "join=min",
        "join=max",
        "tests/metrics/test_metrics.py",
    ),
    Mutant(
        "links to the metrics outlive them",
        "metrics/http.py",
        "            link.cancel()\n\n    async def _serve",
        "            pass\n\n    async def _serve",
        "tests/metrics/test_http.py",
    ),
    # -- accelerators
    Mutant(
        "weights leave an accelerator before they are written",
        "tensors/devices.py",
        "self.source_of(flat).tensor()\n        api.synchronize(self.device)\n",
        "self.source_of(flat).tensor()\n",
        "tests/tensors/test_devices.py -k 'another_stream'",
    ),
    Mutant(
        "a copy from an accelerator counts before it has ended",
        "tensors/devices.py",
        "may use the buffer again at once.\n            api.synchronize(self.device)\n",
        "may use the buffer again at once.\n            pass\n",
        "tests/tensors/test_devices.py -k 'thousand'",
    ),
    Mutant(
        "weights change below a forward that an accelerator has to run yet",
        "tensors/devices.py",
        "        api.synchronize(self.device)\n        try:\n            with contextlib.closing(",
        "        try:\n            with contextlib.closing(",
        "tests/tensors/test_devices.py -k 'another_stream'",
    ),
    Mutant(
        "a copy to an accelerator counts before it has ended",
        "tensors/devices.py",
        "may give the buffer back at once.\n            api.synchronize(self.device)\n",
        "may give the buffer back at once.\n            pass\n",
        "tests/tensors/test_devices.py -k 'thousand'",
    ),
    Mutant(
        "a loader takes a tensor that has not arrived on the device",
        "tensors/devices.py",
        "                ready[2]()\n",
        "",
        "tests/tensors/test_devices.py -k 'one_by_one'",
    ),
    Mutant(
        "a pinned block is filled while it is transferred",
        "tensors/devices.py",
        "        self._waits[self._turn]()\n",
        "",
        "tests/tensors/test_devices.py -k 'pinned_blocks'",
    ),
    Mutant(
        "what was in a gap of the block before is sent",
        "tensors/devices.py",
        "flat.array[start:stop] = 0",
        "pass",
        "tests/tensors/test_devices.py -k 'get_there_and_back'",
    ),
    Mutant(
        "a copy on a device does not wait for what is queued there",
        "tensors/copying.py",
        "        api.synchronize(device)\n    try:",
        "        pass\n    try:",
        "tests/schemes/test_device_memory.py -k 'other_streams'",
    ),
    Mutant(
        "a copy on a device counts before it has ended",
        "tensors/copying.py",
        "        for device in devices:\n            api.synchronize(device)\n\n\ndef _copy(",
        "        pass\n\n\ndef _copy(",
        "tests/tensors/test_devices.py -k 'between_tensors'",
    ),
    Mutant(
        "a slot goes back in the middle of a copy as the link ends",
        "transports/shared_memory/reader.py",
        "if any(view.is_read_directly and view.locked for view in self.segments.values()):",
        "if False:",
        "tests/schemes/test_device_memory.py -k 'middle_of_a_copy'",
    ),
    Mutant(
        "a worker reads a slot whose device memory was not announced yet",
        "transports/shared_memory/reader.py",
        " or (view.on_device and index not in view.blocks)",
        "",
        "tests/schemes/test_device_memory.py -k 'never_given'",
    ),
    Mutant(
        "a worker can write to a slot in device memory",
        "device_memory/memory.py",
        "writable=shared)",
        "writable=True)",
        "tests/schemes/test_device_memory.py -k 'write_to_a_slot'",
    ),
    Mutant(
        "a forked child calls the driver",
        "device_memory/memory.py",
        "    if os.getpid() == pid:  # a",
        "    if True:  # a",
        "tests/schemes/test_device_memory.py -k 'forked_child'",
    ),
    Mutant(
        "what torch caches on a device is not given back",
        "device_memory/memory.py",
        "free = driver.make_room()",
        "free = 0",
        "tests/schemes/test_device_memory.py -k 'full'",
    ),
    Mutant(
        "a worker on another device copies from a slot",
        "tensors/plan.py",
        "        if self.devices != {device} and (self.devices or not new):",
        "        if False:",
        "tests/schemes/test_device_memory.py -k 'worker_on_the_cpu'",
    ),
    Mutant(
        "a worker keeps slots of older sizes",
        "receiver/update_reader.py",
        "            self._forget_others(slot.key)\n",
        "",
        "tests/schemes/test_device_memory.py -k 'older_sizes'",
    ),
    Mutant(
        "the loop waits for a device as a worker leaves",
        "receiver/model.py",
        "on_cpu = isinstance(target, Target) and not target.waits",
        "on_cpu = True",
        "tests/schemes/test_device_memory.py -k 'middle_of_a_copy'",
    ),
    Mutant(
        "the trainer's loop waits for an accelerator",
        "sender/snapshots.py",
        "large = prepared.waits or prepared.layout.nbytes > _INLINE_NBYTES",
        "large = prepared.layout.nbytes > _INLINE_NBYTES",
        "tests/schemes/test_accelerator.py",
    ),
    Mutant(
        "a worker's loop waits for an accelerator",
        "receiver/turns.py",
        "if self._in_thread is not None or (self._model.waits and not self.has_ended):",
        "if False:",
        "tests/schemes/test_accelerator.py",
    ),
    Mutant(
        "a read does not wait for the thread that is to apply",
        "receiver/turns.py",
        "self._guard.offer(self.take)",
        "self._guard._apply = self.take",
        "tests/schemes/test_accelerator.py",
    ),
    Mutant(
        "pages that a worker's accelerator reads are taken away",
        "transports/shared_memory/slots.py",
        "except BlockingIOError:\n            slot.release()\n            return\n",
        "except BlockingIOError:\n            pass\n",
        "tests/transports/test_pinned_slots.py",
    ),
    Mutant(
        "pages that the trainer's accelerator writes are taken away",
        "transports/shared_memory/slots.py",
        "slot.buffer.unpin()",
        "pass",
        "tests/transports/test_pinned_slots.py",
    ),
]


def pytest(copy: Path, tests: str, patience: float) -> tuple[int, str]:
    """Run tests in the copy; return the exit status, 1 if they do not end, and the last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *shlex.split(tests)],
            cwd=copy,
            env={
                **os.environ,
                "PYTHONPATH": str(copy),
                # The copy changes within a second, in which bytecode would look new.
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATIENCE": str(patience),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS + 2 * patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "the tests did not end"
    return done.returncode, (done.stdout + done.stderr).strip().rpartition("\n")[2]


def without_faults(copy: Path, chosen: list[Mutant]) -> bool:
    """Return True if the tests pass without a fault."""
    wanted: dict[tuple[str, float], set[str]] = {}
    for mutant in chosen:
        tests, _, some = mutant.tests.partition(" -k ")
        wanted.setdefault((tests, mutant.patience), set()).add(some.strip("'"))
    for (tests, patience), filters in wanted.items():
        some = "" if "" in filters else f" -k {shlex.quote(' or '.join(sorted(filters)))}"
        status, last = pytest(copy, tests + some, patience)
        if status:
            print(f"without any fault {tests} fails: {last}")
            return False
    return True


def run(mutant: Mutant, copy: Path) -> str:
    """Try one fault; return ``""`` if it was found, else the reason why not."""
    if not mutant.fits(copy):
        return f"does not apply: its old text does not occur once in {mutant.file}"
    path = copy / "aiosync" / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, last = pytest(copy, mutant.tests, mutant.patience)
    finally:
        path.write_text(text)
    return "" if status == 1 else f"{'pytest failed' if status else 'missed'}: {last}"


def main() -> int:
    """Try the chosen faults; return 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="those whose name holds this")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    asked = parser.parse_args()
    chosen = [each for each in MUTANTS if (asked.only or "") in each.name]
    if asked.list:
        for each in chosen:
            print(f"{each.name}  [{each.file}: {each.tests}]")
        return 0
    bad = 0
    with tempfile.TemporaryDirectory(prefix="aiosync-mutants-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist")
        shutil.copytree(ROOT, copy, ignore=ignored)
        if not without_faults(copy, chosen):
            return 1
        for each in chosen:
            started = time.monotonic()
            why = run(each, copy)
            bad += bool(why)
            took = time.monotonic() - started
            print(f"{'MISSED' if why else 'found '} {took:5.1f} s  {each.name}", flush=True)
            if why:
                print(f"        {why}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults were found")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
