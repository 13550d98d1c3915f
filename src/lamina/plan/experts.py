"""The experts of a model: stacked in tensors with an axis of experts, or modules in a list.

    stacked   a module that states its number of experts E and owns a tensor of three or more axes, the first of E
    a list    a ModuleList of equal modules that is called, or whose modules are called, experts

The router belongs to no expert, nor does an expert that all tokens visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lamina.errors import PlanError
from lamina.plan.naming import ROOT
from lamina.plan.parts import Part, PartKind, Piece, Unread
from lamina.plan.stated import Declarations, related, stated, whole

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts", "experts")

DECLARED = "lamina_experts"
"""The attribute by which a module says itself how many experts it holds; 0: none."""


def find_experts(model: nn.Module, given: Mapping[str, int]) -> tuple[list[Part], list[Unread]]:
    """The experts of every mixture. `given`: by pattern of module names, how many; 0: it has none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    declared = Declarations(given, DECLARED, "experts")
    parts: list[Part] = []
    strange: dict[str, str] = {}
    read: set[str] = set()
    for path, module in modules.items():
        wanted = declared.of(path, module)
        if any(path.startswith(f"{other}.") for other in read | strange.keys()):
            continue
        if wanted is not None and not whole(wanted) and (wanted != 0 or isinstance(wanted, bool)):
            raise PlanError(
                "plan.experts-declared",
                f"experts of {path or ROOT!r} are declared as {wanted!r}",
                "give how many there are, 0 if none",
            )
        if wanted == 0:
            read.add(path)
            continue
        found, problem = _experts(path, module, modules, wanted)
        if problem and wanted is not None:
            raise PlanError(
                "plan.declared-hold-experts",
                f"{path or ROOT!r} is declared to hold {wanted} experts, but {problem}",
                "correct the declaration",
            )
        if problem:
            strange[path] = problem
        elif found:
            parts += found
            read.add(path)
    declared.check()
    for path, module in modules.items():
        name, owns = type(module).__name__, any(True for _ in module.parameters())
        if "experts" in name.lower() and owns and not related(path, read | strange.keys()):
            strange[path] = f"how this {name} holds them is not known"
    return parts, [
        Unread(module=path or ROOT, kind=PartKind.EXPERTS, why=why) for path, why in strange.items()
    ]


def _experts(
    path: str, module: nn.Module, modules: Mapping[str, nn.Module], wanted: int | None
) -> tuple[list[Part], str]:
    """The parts of the experts that this module holds, and the problem if it seems to hold some that are not known."""
    above = modules.get(path.rpartition(".")[0])
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        name = path.rpartition(".")[2].lower()
        called = "expert" in name or any(
            "expert" in type(child).__name__.lower() for child in module.children()
        )
        if wanted is None and (not called or "shared" in name):
            return [], ""
        number = wanted if wanted is not None or above is None else stated(above, _COUNTS)
        return _listed(path, module, number)
    count = wanted if wanted is not None else stated(module, _COUNTS)
    if count is None:
        return [], ""
    own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    if not any(tensor.ndim >= 3 and tensor.shape[0] == count for tensor in own.values()):
        return [], "no tensor of it has such an axis" if wanted is not None else ""
    return list(_stacked(path, module, count, modules)), ""


def _stacked(path: str, module: nn.Module, count: int, modules: Mapping[str, nn.Module]) -> Iterator[Part]:
    """One piece for each expert, along the first axis. A matrix beside them may be a router: only a bias is theirs."""
    each = tuple((e, e + 1, (e,)) for e in range(count))
    for name, tensor in module._parameters.items():
        if tensor is not None:
            theirs = tensor.ndim >= 3 or (tensor.ndim == 2 and "bias" in name)
            pieces = each if theirs and tensor.shape[0] == count else ()
            yield _part(path, count, f"{path}.{name}" if path else name, tuple(tensor.shape), pieces)
    head, _, last = path.rpartition(".")
    if last == "base_layer" and head in modules:  # factors that PEFT lays around them serve all experts
        for name, tensor in modules[head].named_parameters(remove_duplicate=False):
            if not name.startswith("base_layer."):
                yield _part(path, count, f"{head}.{name}", tuple(tensor.shape), ())


def _listed(path: str, module: nn.ModuleList | nn.ModuleDict, number: int | None) -> tuple[list[Part], str]:
    children = list(module.named_children())
    forms = {_form(child) for _, child in children}
    if not children or forms == {()}:
        return [], ""
    if len(forms) > 1:
        return [], "its experts are not alike"
    if number is not None and number != len(children):
        return [], f"it holds {len(children)} modules where {number} experts are stated"
    return [
        _part(path, len(children), f"{path}.{key}.{name}", shape, ((0, shape[0] if shape else 1, (e,)),))
        for e, (key, child) in enumerate(children)
        for name, shape in _form(child)
    ], ""


def _form(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (name, tuple(tensor.shape)) for name, tensor in module.named_parameters(remove_duplicate=False)
    )


def _part(
    path: str,
    count: int,
    tensor: str,
    shape: tuple[int, ...],
    pieces: tuple[Piece, ...],
) -> Part:
    return Part(
        kind=PartKind.EXPERTS,
        group=path or ROOT,
        count=count,
        tensor=tensor,
        axis=0,
        length=shape[0] if shape else 1,
        pieces=pieces,
    )
