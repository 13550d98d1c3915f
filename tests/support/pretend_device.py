"""A device that is not there: tensors on "pretend" hold a CPU tensor, and refuse what an accelerator refuses.

An operation on them and on CPU tensors is an error, unless the CPU tensor has no dimensions or is an index, as with CUDA;
so is `.numpy()`. Their addresses lead nowhere. Backward passes run on a thread of their own, as they do for CUDA. While
`without_float64()`, the device has no float64, as MPS.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_COPIES = {"copy_", "_copy_from", "_to_copy"}  # may have tensors of two devices
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}  # CUDA takes indices on the CPU here
_NOWHERE = 1 << 60  # what is added to an address, so that nobody can read there
_libraries: list[torch.library.Library] = []  # what they register lasts as long as they do
_float64 = [True]


class PretendTensor(Tensor):
    """A tensor of the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> PretendTensor:
        if held.dtype == torch.float64 and not _float64[0]:
            raise TypeError("the pretend device has no float64")
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        made.held = held.detach()
        return made  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return self.held.data_ptr() + _NOWHERE

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.held!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, given = func._schema.name.removeprefix("aten::"), pytree.tree_leaves((args, kwargs))
    tensors = [t for t in (given[:1] if name in _INDEXING else given) if isinstance(t, Tensor)]
    if name not in _COPIES and any(t.is_cpu and t.dim() > 0 for t in tensors):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {NAME} and cpu")
    options, here = _inner(kwargs), kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    out = func(*_inner(args), **options)
    written = next((a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write), None)
    if written is not None:  # in place, or to `out`
        places = [i for i, a in enumerate(func._schema.arguments) if a.name == written.name]
        into = kwargs[written.name] if written.name in kwargs else args[places[0]]
        return into if len(func._schema.returns) else None
    return out if here else pytree.tree_map_only(Tensor, PretendTensor, out)


def _inner(tree: Any) -> Any:
    return pytree.tree_map_only(PretendTensor, lambda t: t.held, tree)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inner(target).copy_(_inner(source))
    return target


class _Module(ModuleType):
    """torch.pretend: its generator is torch's own."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


@cache
def pretend_device() -> torch.device:
    """Register the device once, and return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(NAME))
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        op = _operation(name)
        arguments = [] if op is None else op._schema.arguments
        makes = any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)
        if makes and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            library.impl(name.removeprefix("aten::"), _factory(op), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    _libraries.extend((library, autocast))
    return torch.device(NAME, 0)


def _operation(name: str) -> Any:
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, short), overload or "default") if space == "aten" else None
    except (AttributeError, RuntimeError):
        return None


def _factory(op: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        return PretendTensor(op(*args, **{**kwargs, "device": torch.device("cpu")}))

    return make


@contextmanager
def without_float64() -> Iterator[None]:
    """The device has no float64 meanwhile."""
    _float64[0] = False
    try:
        yield
    finally:
        _float64[0] = True
