"""Copies from and to accelerators, on a fake one that copies only when somebody waits for it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from aiosync.device_memory import DeviceMemory
from aiosync.errors import ConfigError, TransportBroken
from aiosync.tensors import FlatBuffer, Flattener, Target
from aiosync.tensors.accelerator import accelerator
from aiosync.tensors.copying import copy_tensors
from aiosync.tensors.device_buffer import DeviceBuffer
from aiosync.tensors.devices import BLOCK_NBYTES, uploaded
from aiosync.tensors.dtypes import DTYPES
from aiosync.tensors.mapping import check_dtypes
from tests.support.accelerator import Deferred, deferred


@pytest.fixture
def device() -> Iterator[Deferred]:
    with deferred() as fake:
        yield fake


class Many(nn.Module):
    """A model of small and odd sizes, some not contiguous, and one tensor larger than a block."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((n,), value) for n in (1, 3, 1000, 17))
        self.turned = nn.Parameter(torch.full((5, 7), value).t())
        self.less = nn.Parameter(torch.full((3, 11), value, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("empty", torch.empty(0))
        self.large = nn.Parameter(torch.full((BLOCK_NBYTES // 4 + 5,), value))
        self.register_buffer("last", torch.full((9,), value))


def many_small() -> dict[str, torch.Tensor]:
    return {f"{n:04}": torch.full((1024,), float(n)) for n in range(1000)}


def private(nbytes: int) -> FlatBuffer:
    """Return a buffer as a worker maps a slot: it must not be pinned, as others write there."""
    return FlatBuffer(mmap.mmap(-1, max(nbytes, 1)))


MEMORY: list[Callable[[int], FlatBuffer]] = [FlatBuffer, private]


@pytest.mark.parametrize("memory", MEMORY)
def test_all_leaves_get_there_and_back(
    device: Deferred, memory: Callable[[int], FlatBuffer]
) -> None:
    source, target, flattener = Many(1.0), Many(0.0), Flattener()
    to = Target(target)
    for value in (2.0, 3.0, 4.0):
        for tensor in source.state_dict().values():
            tensor.fill_(value)
        prepared = flattener.prepare(source)
        flat = memory(prepared.layout.nbytes)
        flat.array[:] = 0xEE
        prepared.copy_into(flat)
        assert not any(flat.array[start:end].any() for start, end in prepared.layout.padding())
        expected = deepcopy(source.state_dict())
        to.apply_(prepared.layout, flat, {}, copy=False)
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_a_thousand_small_tensors_are_one_transfer(device: Deferred) -> None:
    source = many_small()
    prepared = Flattener().prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    assert device.num_transfers == 1
    views = flat.views(prepared.layout)
    assert all(map(torch.equal, views, source.values()))
    target = {name: torch.zeros(1024) for name in source}
    Target(target).apply_(prepared.layout, flat, {}, copy=True)
    assert device.num_transfers == 2
    assert all(torch.equal(target[name], source[name]) for name in source)


def test_memory_of_the_device_is_bounded(device: Deferred) -> None:
    # These tensors take 160 MiB, which is more than one block of the device's memory.
    source = {f"{n:02}": torch.full((2**20,), float(n)) for n in range(40)}
    prepared = Flattener().prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    assert device.num_transfers == 5
    assert device.taken <= BLOCK_NBYTES
    target = {name: torch.zeros(2**20) for name in source}
    apply = Target(target).apply_
    apply(prepared.layout, flat, {}, copy=True)
    assert device.taken <= 2 * BLOCK_NBYTES
    assert all(torch.equal(target[name], source[name]) for name in source)
    through = private(flat.nbytes)
    through.array[:] = flat.array[::-1][::-1]
    for tensor in target.values():
        tensor.zero_()
    apply(prepared.layout, through, {}, copy=True)
    assert all(torch.equal(target[name], source[name]) for name in source)


@pytest.mark.parametrize("size", [5, 2**20])
def test_what_another_stream_has_to_do_yet_is_done_before(device: Deferred, size: int) -> None:
    source = {"a": torch.zeros(size), "b": torch.zeros(3)}
    prepared = Flattener().prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    device.elsewhere.append(lambda: [each.fill_(1.0) for each in source.values()])
    prepared.copy_into(flat)
    assert all(view.eq(1.0).all() for view in flat.views(prepared.layout))
    target, seen = {name: torch.zeros_like(each) for name, each in source.items()}, []
    # This stands for a forward on another stream.
    device.elsewhere.append(lambda: seen.append(float(target["a"].max())))
    Target(target).apply_(prepared.layout, flat, {}, copy=True)
    assert seen == [0.0]
    assert all(each.eq(1.0).all() for each in target.values())


def test_other_dtypes_on_the_way(device: Deferred) -> None:
    # A tensor of this size is larger than a block in float64, and smaller in bfloat16.
    large = BLOCK_NBYTES // 8 + 3
    source = {"a": torch.arange(7.0), "b": torch.arange(large, dtype=torch.float64)}
    prepared = Flattener(dtype=check_dtypes(torch.bfloat16, "wire_dtype")).prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    for view, tensor in zip(flat.views(prepared.layout), source.values(), strict=True):
        assert torch.equal(view, tensor.to(torch.bfloat16))
    target = {name: torch.zeros_like(each) for name, each in source.items()}
    Target(target, strict=False).apply_(prepared.layout, flat, {}, copy=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, source[name].to(torch.bfloat16).to(tensor.dtype))


@pytest.mark.parametrize("there", [False, True], ids=["through the host", "on the device"])
def test_tensors_of_several_dtypes_beside_each_other(device: Deferred, there: bool) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.int64, torch.float16, torch.int64]
    source = {str(at): torch.full((5,), at + 1, dtype=each) for at, each in enumerate(dtypes)}
    # Some have another dtype on the way, and some again another one in the target.
    on_the_way = check_dtypes({"1": torch.float32, "2": torch.bfloat16}, "wire_dtype")
    prepared = Flattener(dtype=on_the_way).prepare(source)
    nbytes = prepared.layout.nbytes
    memory = DeviceMemory.allocate(device.fake_driver, device.fake_driver.granularity)
    flat = DeviceBuffer(nbytes, lambda: memory) if there else FlatBuffer(nbytes)
    prepared.copy_into(flat)
    for view, tensor in zip(flat.views(prepared.layout), source.values(), strict=True):
        assert torch.equal(view, tensor.to(view.dtype))
    target = {name: torch.zeros_like(each) for name, each in source.items()}
    target["0"] = target["0"].half()
    Target(target, strict=False).apply_(prepared.layout, flat, {}, copy=True)
    assert all(torch.equal(target[name], source[name].to(target[name].dtype)) for name in source)


def test_mixed_with_what_stays_on_the_host(device: Deferred) -> None:
    class Host(torch.Tensor):
        """A tensor that is not on the fake accelerator."""

    source = {"a": torch.ones(3), "b": torch.ones(5).as_subclass(Host), "c": torch.ones(7)}
    prepared = Flattener().prepare(source)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    assert all(view.eq(1.0).all() for view in flat.views(prepared.layout))
    # No transfer writes between the two tensors of the device, where the host's tensor is.
    assert device.num_transfers == 2


def test_a_worker_reads_the_pages_of_a_slot_directly(device: Deferred) -> None:
    source = {"a": torch.zeros(2**18), "b": torch.zeros(2**18)}
    prepared = Flattener().prepare(source)
    nbytes = prepared.layout.nbytes
    fd = os.memfd_create("slot")
    os.ftruncate(fd, nbytes)
    asked = []

    def share() -> memoryview:
        asked.append(nbytes)
        return memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    shared = FlatBuffer(mmap.mmap(fd, nbytes), pinnable=True)
    private = FlatBuffer(mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE), share=share)
    target = {name: torch.zeros(2**18) for name in source}
    apply = Target(target).apply_
    for value in (1.0, 2.0, 3.0, 4.0):
        for each in source.values():
            each.fill_(value)
        prepared.copy_into(shared)
        apply(prepared.layout, private, {}, copy=True)
        assert all(each.eq(value).all() for each in target.values())
    assert asked == [nbytes]
    seen = private.shared()
    assert seen is not None and seen.pinned is not None and seen.read_only
    assert private.pinned is None
    os.close(fd)


def test_memory_of_others_that_cannot_be_mapped_again_goes_through_pinned_blocks(
    device: Deferred,
) -> None:
    def share() -> memoryview:
        raise OSError("no room")

    source = {name: torch.full((2**18,), float(at)) for at, name in enumerate("abcdefg")}
    prepared = Flattener().prepare(source)
    private = FlatBuffer(mmap.mmap(-1, prepared.layout.nbytes), share=share)
    prepared.copy_into(private)
    # These four tensors go through four blocks, one after the other.
    target = {name: torch.zeros(2**18) for name in "aceg"}
    apply = Target(target, strict=False).apply_
    for _ in range(3):
        for each in target.values():
            each.zero_()
        apply(prepared.layout, private, {}, copy=True)
        assert all(torch.equal(target[name], source[name]) for name in target)


class OnlyLarge(Deferred):
    """A fake accelerator that has no small tensors."""

    def has(self, tensor: torch.Tensor) -> bool:
        return super().has(tensor) and tensor.numel() > 1000


class Failing(Deferred):
    """A fake accelerator whose second transfer fails."""

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.num_transfers == 1:
            raise RuntimeError("no second transfer")
        super().transfer(target, source)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("size", [3, 2**18])
def test_no_transfer_goes_on_after_an_error(memory: Callable[[int], FlatBuffer], size: int) -> None:
    class Host(torch.Tensor):
        """A tensor that is not on the fake accelerator, so that the others are two blocks."""

    source = {name: torch.ones(size) for name in "abc"}
    source["b"] = source["b"].as_subclass(Host)
    with deferred(Failing()) as fake:
        prepared = Flattener().prepare(source)
        flat = memory(prepared.layout.nbytes)
        with pytest.raises(RuntimeError, match="no second transfer"):
            prepared.copy_into(flat)
        # The trainer may write the next version there at once.
        flat.array[:] = 0xEE
        fake.synchronize(torch.device("cpu"))
        assert bool((flat.array == 0xEE).all())
    target = {name: torch.zeros(size) for name in "ac"}
    with deferred(Failing()) as fake:
        with pytest.raises(RuntimeError, match="no second transfer"):
            Target(target, strict=False).apply_(prepared.layout, flat, {}, copy=True)
        before = deepcopy(target)
        flat.array[:] = 0
        fake.synchronize(torch.device("cpu"))
        assert all(torch.equal(target[name], before[name]) for name in target)


def test_nothing_is_written_if_the_memory_of_others_is_gone() -> None:
    def share() -> memoryview:
        raise TransportBroken("foreign code has closed the descriptor")

    source = {"large": torch.ones(2**18), "small": torch.ones(3)}
    with deferred(OnlyLarge()):
        prepared = Flattener().prepare(source)
        private = FlatBuffer(mmap.mmap(-1, prepared.layout.nbytes), share=share)
        prepared.copy_into(private)
        target = {name: torch.zeros_like(each) for name, each in source.items()}
        with pytest.raises(TransportBroken):
            Target(target).apply_(prepared.layout, private, {}, copy=True)
    assert not any(bool(each.any()) for each in target.values())


def test_parameters_on_the_cpu_never_point_at_device_memory(device: Deferred) -> None:
    source, target = {"w": torch.ones(5)}, nn.Module()
    target.w = nn.Parameter(torch.zeros(5))
    prepared, to = Flattener().prepare(source), Target(target)
    flat = FlatBuffer(prepared.layout.nbytes)
    prepared.copy_into(flat)
    device.has = lambda tensor: False  # type: ignore[method-assign]
    for _ in range(2):
        to.apply_(prepared.layout, flat, {}, copy=False)
    memory = DeviceMemory.allocate(device.fake_driver, flat.nbytes)
    with pytest.raises(ConfigError, match="told to point at them"):
        to.apply_(prepared.layout, DeviceBuffer(memory.nbytes, lambda: memory), {}, copy=False)


def test_what_a_loader_takes_one_by_one_has_arrived(device: Deferred) -> None:
    sent = {
        "large": torch.arange(2 * BLOCK_NBYTES // 4 + 3, dtype=torch.float32),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "half": torch.full((5, 2), 1.5, dtype=torch.bfloat16),
        "block": torch.full((BLOCK_NBYTES,), 3, dtype=torch.uint8),
    }
    kept = {}
    for name, tensor in uploaded(list(sent.items()), torch.device("cpu")):
        assert tensor.dtype is sent[name].dtype and torch.equal(tensor, sent[name])
        assert tensor.untyped_storage().nbytes() == sent[name].nbytes
        kept[name] = tensor
    assert list(kept) == list(sent)
    # The pinned blocks were used again, which must not change what came before.
    assert all(torch.equal(kept[name], sent[name]) for name in sent)
    assert list(uploaded([], torch.device("cpu"))) == []


def test_only_the_next_tensor_is_ahead_of_the_loader(device: Deferred) -> None:
    sent = [(str(n), torch.full((1024,), float(n))) for n in range(10)]
    for number, _ in enumerate(uploaded(sent, torch.device("cpu")), start=2):
        assert device.taken == min(number, 10) * 4096


def test_what_is_kept_of_a_model_keeps_its_values(device: Deferred) -> None:
    model, flattener = nn.Linear(4, 2), Flattener()
    to, kept = Target(model, strict=False), []
    for value in (2.0, 3.0, 4.0):
        prepared = flattener.prepare({"weight": torch.full((2, 4), value)})
        flat = private(prepared.layout.nbytes)
        prepared.copy_into(flat)
        to.apply_(prepared.layout, flat, {}, copy=False)
        kept.append((value, model.weight.detach()))
        assert all(bool(each.eq(was).all()) for was, each in kept)


def test_a_copy_between_tensors_of_the_device_has_ended(device: Deferred) -> None:
    targets = [torch.zeros(5), torch.zeros(3, 2)]
    copy_tensors([(each, torch.ones_like(each)) for each in targets])
    assert all(bool(each.eq(1.0).all()) for each in targets)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_torch_does_not_copy_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "complex32 float8_e8m0fnu uint16 uint32 uint64".split()
    alone = {dtype for dtype, name in DTYPES.items() if name in names}
    together, seen = torch._foreach_copy_, set[torch.dtype]()

    def on_cuda(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for each in [*targets, *sources]:
            if each.dtype in alone:
                raise NotImplementedError(f'"foreach_tensor_copy" not implemented for {each.dtype}')
            seen.add(each.dtype)
        together(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", on_cuda)
    casts = [(torch.float32, dtype) for dtype in alone if dtype.is_floating_point]
    casts += [(torch.complex32, torch.complex64), (torch.complex64, torch.complex32)]
    for to, of in [*zip(DTYPES, DTYPES, strict=True), *casts]:
        sources = [torch.ones(size).to(of) for size in (1, 5, 0)]
        targets = [torch.zeros_like(each, dtype=to) for each in sources]
        accelerator().copy(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            expected = source.to(to).view(torch.uint8)
            assert torch.equal(target.view(torch.uint8), expected), (to, of)
    assert seen == DTYPES.keys() - alone


def test_memory_that_is_kept_for_copies_is_of_no_inference_mode(device: Deferred) -> None:
    source, target, flattener = Many(1.0), Many(0.0), Flattener()
    to = Target(target)
    with torch.inference_mode():
        prepared = flattener.prepare(source)
        flat = FlatBuffer(prepared.layout.nbytes)
        prepared.copy_into(flat)
        to.apply_(prepared.layout, flat, {}, copy=True)
    for tensor in source.state_dict().values():
        tensor.fill_(2)
    flattener.prepare(source).copy_into(flat)
    to.apply_(prepared.layout, flat, {}, copy=True)
    for name, tensor in target.state_dict().items():
        assert bool(tensor.eq(2).all()), name


@pytest.mark.parametrize("there", [False, True], ids=["on the host", "on the device"])
def test_weights_that_were_freed_are_refused_after_a_plan_too(
    device: Deferred, there: bool
) -> None:
    model, flattener = nn.Linear(2, 2), Flattener()
    nbytes = flattener.prepare(model).layout.nbytes
    memory = DeviceMemory.allocate(device.fake_driver, nbytes)
    flat = DeviceBuffer(nbytes, lambda: memory) if there else FlatBuffer(nbytes)
    for _ in range(2):
        flattener.prepare(model).copy_into(flat)
    model.weight.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="'weight' .*freed"):
        flattener.prepare(model).copy_into(flat)
    model.weight.data = torch.full((2, 2), 3.0)
    prepared = flattener.prepare(model)
    prepared.copy_into(flat)
    assert all(map(torch.equal, flat.views(prepared.layout), prepared.tensors))
