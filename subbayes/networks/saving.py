"""Saving a network in an artifact, without its weights, and rebuilding it.

The base model beside adapters is not saved; digests of its shapes and of its values identify it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from subbayes.artifacts.arrays import ANY, Array, Arrays
from subbayes.artifacts.facts import Facts, Name, as_facts
from subbayes.artifacts.tensors import add_prefix, strip_prefix
from subbayes.networks.adapters.in_use import (
    active_adapters,
    check_active_adapters,
    check_single_adapter,
    replaced_names,
)
from subbayes.networks.adapters.names import check_active, has_adapters, settings_digest
from subbayes.networks.hierarchical.fourier_process import FourierProcess, FourierProcessSettings
from subbayes.networks.hierarchical.mlp import HierarchicalMLP, HierarchicalMLPSettings
from subbayes.networks.identity.architecture import architecture_of
from subbayes.networks.identity.attributes import as_complex, as_real
from subbayes.networks.mlp import MLP, MLPSettings
from subbayes.networks.module_copy import private_copy
from subbayes.networks.network import Network
from subbayes.networks.outputs import HALF
from subbayes.networks.tracing.private_torch import uncompiled
from subbayes.utils.checks import fail, fail_type
from subbayes.utils.types import OutputFunction

_ADAPTED = "load(path, PeftModel.from_pretrained(base model, folder of the adapter))"
_DIGESTED = 2**24  # numbers that are read at once

NETWORK_ARRAYS: Arrays = {
    "network.attribute.*": ANY,
    "network.frozen.*": ANY,
    "network.mask.*": Array(None, dtype="flag"),
}
"""What the tensors of a network have to be, beside its weights."""
Float = Literal["float16", "bfloat16", "float32", "float64"]


class BaseFacts(Facts):
    """What identifies the base model beside adapters.

    Attributes:
        own: names of frozen parameters that the artifact holds.
        active: the adapters in use.
        adapters: dtype of their weights.
        settings: digest of the configurations.
        shapes: digest of the names and shapes of the parameters.
        values: digest of their values.
        dtypes: their dtypes.
        model: the name that the base model was loaded by, for messages.
    """

    own: list[str]
    active: list[str]
    adapters: Float
    settings: str
    shapes: str
    values: str
    dtypes: list[str]
    model: Name


ModuleSettings = MLPSettings | HierarchicalMLPSettings | FourierProcessSettings


class NetworkFacts(Facts):
    """A network but for its tensors.

    Attributes:
        architecture: see `architecture_of`.
        names: names of the parameters whose weights are random.
        module: the settings of an `MLP`; None of other modules.
        base: the base model of adapters.
        dtypes: of the parameters, if some have 16 bits.
    """

    architecture: str
    names: list[str]
    module: ModuleSettings | None = None
    base: BaseFacts | None = None
    dtypes: list[Float] | None = None

    def __post_init__(self) -> None:
        if not self.names or len(self.dtypes or self.names) != len(self.names):
            raise ValueError("expected names of parameters, and a dtype of each")


def network_tensors(network: Network) -> dict[str, Tensor]:
    """Frozen parameters but those of a base model, buffers, plain tensors and masks of a network.

    Adapters that are loaded beside those in use are left out.
    """
    own = {n: t for n, t in network.used_frozen.items() if n not in network.base_names}
    found = add_prefix("network.frozen", {name: as_real(t) for name, t in own.items()})
    found |= add_prefix("network.attribute", network.attributes)
    return found | add_prefix("network.mask", network.masks)


def network_facts(network: Network) -> NetworkFacts:
    """The architecture of a network, the settings of an `MLP`, and the identity of a base model.

    Raises:
        InputError: a base model whose weights have changed since the network was made.

    Example:
        >>> network_facts(Network(MLP(2, (), 1))).module.n_inputs
        2
    """
    if (name := network.changed_weights(every_number=True)) is not None:
        fail(
            "model",
            "the base model that it was fitted beside",
            f"one whose weights have changed since: {_short(name)}",
            "Merge adapters and train in a copy, and fit again around a fresh base model",
        )
    module = network.module_with()
    facts = NetworkFacts(
        architecture=architecture_of(module), names=list(network.names), module=_settings_of(module)
    )
    dtypes = [network.dtype_of(name) for name in network.names]
    if not network.base_names and any(dtype in HALF for dtype in dtypes):
        halves: Any = [str(dtype)[6:] for dtype in dtypes]  # `weights` is float32
        facts.dtypes = halves
    if network.base_names:
        facts.base = base_identity(network, network.base_names, network.unused)
    return facts


def _settings_of(module: nn.Module) -> ModuleSettings | None:
    """The settings of a module that can be rebuilt from them; None of others."""
    if isinstance(module, HierarchicalMLP):
        return as_facts(module.settings, HierarchicalMLPSettings)
    if isinstance(module, FourierProcess):
        return as_facts(module.settings, FourierProcessSettings)
    return MLPSettings(**module.settings) if isinstance(module, MLP) else None


def base_identity(
    network: Network, names: Collection[str], unused: Collection[str] = ()
) -> BaseFacts:
    """What identifies the base model of a network.

    Every value is read, at about 1.5 GB a second: half a second for 400 million weights in
    bfloat16, ten seconds for 7 billion.

    Args:
        network: the network.
        names: names of the parameters of its base model.
        unused: names that do not count, as `Network.unused`.
    """
    module = network.module_with()
    tensors = {name: network.frozen[name].detach() for name in sorted({*names} - {*unused})}
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for name, tensor in tensors.items():
        shapes.update(f"{name} {tuple(tensor.shape)}\n".encode())
        for part in tensor.reshape(-1).split(_DIGESTED):
            values.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
    known, others = dict(module.named_parameters()), {*names, *unused, *network.names}
    adapters: Any = str(network.dtype_of(network.names[0]))[6:]
    return BaseFacts(
        own=sorted(known.keys() - others),
        active=active_adapters(module),
        adapters=adapters,
        settings=settings_digest(module),
        shapes=shapes.hexdigest(),
        values=values.hexdigest(),
        dtypes=sorted({str(tensor.dtype) for tensor in tensors.values()}),
        model=_model_name(module),
    )


def _model_name(module: nn.Module) -> str:
    """The name of a model of transformers, as it was loaded; empty for other modules."""
    configs = [getattr(m, "config", None) for m in module.modules()]
    names = (getattr(config, "_name_or_path", None) for config in configs)
    return str(next(filter(None, names), ""))[:1000]


def known_outputs(facts: NetworkFacts, output: Any = None) -> int | None:
    """Number of outputs of a saved `MLP`; None for other modules, or if `output` picks some.

    Example:
        >>> known_outputs(network_facts(Network(MLP(2, (), 1))))
        1
    """
    return None if facts.module is None or output is not None else facts.module.n_outputs


def network_from(
    tensors: Mapping[str, Tensor],
    facts: NetworkFacts,
    weights: Tensor,
    module: nn.Module | None = None,
    output: OutputFunction | None = None,
) -> Network:
    """Rebuild a network at the given weights.

    Args:
        tensors: tensors of the artifact, with those of `network_tensors`.
        facts: the result of `network_facts`.
        weights: its weights (D,), which determine the device and dtype.
        module: a module of the same architecture, unless it is an `MLP`.
        output: selects the output tensor of the module, as for `Network`.

    Raises:
        InputError: no module, or one of another architecture.
    """
    saved_dtypes, base = _dtypes_of(facts), facts.base
    if module is None:
        if facts.module is None:
            remedy = "Pass load(path, module=...): code is not saved, only weights"
            if base is not None:
                remedy = f"Pass {_ADAPTED}"
            expected = f"a module of the saved architecture {_short(facts.architecture)}"
            fail("module", expected, "none", remedy)
        module = facts.module.build(tensors)
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(saved_dtypes.get(name))
    if not isinstance(module, nn.Module):
        fail_type("module", "a torch.nn.Module", module)
    module = uncompiled(module)
    masks = strip_prefix("network.mask", tensors)
    chosen, known = masks or facts.names, dict(module.named_parameters(remove_duplicate=False))
    if base is not None:
        check_active_adapters(base.active, module)
    if any(name not in known for name in chosen):
        refuse_module(facts, module)
    if base is not None:
        check_active(module)
        check_single_adapter(module)
    if base is not None or not all(known[name].requires_grad for name in chosen):
        # adapters that are loaded for inference do not require gradients
        module = private_copy(module, set(chosen), copy_frozen=base is None)
    if base is not None:
        for name, parameter in module.named_parameters():
            if name in chosen:  # peft may have loaded them in another dtype
                parameter.data = parameter.data.to(getattr(torch, base.adapters))
    network = Network(module, chosen, output, copy_frozen=base is None)
    if base is None:
        _check_halves(network, saved_dtypes)
    dtypes = {name: {tensor.dtype} for name, tensor in network.frozen.items()}
    if architecture_of(module) != facts.architecture:
        refuse_module(facts, module)
    unused = set() if base is None else replaced_names(module)
    if (network.device, network.dtype) != (weights.device, weights.dtype):
        network = network.to(weights.device, weights.dtype)
    own, frozen = network.frozen, strip_prefix("network.frozen", tensors)
    for name in frozen.keys() & own.keys():
        frozen[name] = as_complex(frozen[name], own[name])
    if base is not None:
        network.base_names = tuple(sorted(own.keys() - frozen.keys() - masks.keys() - unused))
        check_base(base_identity(network, network.base_names, unused), base)
        frozen |= {name: own[name] for name in {*network.base_names, *unused}}
    for name in frozen.keys() | own.keys():
        shapes = [tuple(d[name].shape) if name in d else None for d in (own, frozen)]
        if shapes[0] != shapes[1]:
            fail("path", f"{name} of shape {shapes[0]}, as the module has", shapes[1])
        allowed = dtypes[name] | {own[name].dtype}  # `Network.to` converts all of them
        if frozen[name].dtype not in allowed:
            expected = f"{name} of {' or '.join(sorted(map(str, allowed)))}, as the module has"
            fail("path", expected, frozen[name].dtype, "Pass a module of the saved dtypes")
    network.set_attributes(strip_prefix("network.attribute", tensors))
    return network.with_buffers(frozen).with_weights(weights)


def _dtypes_of(facts: NetworkFacts) -> dict[str, torch.dtype]:
    """Dtypes of the parameters by name, if some have 16 bits; else empty."""
    dtypes = [getattr(torch, dtype) for dtype in facts.dtypes or ()]
    return dict(zip(facts.names, dtypes, strict=False))


def _check_halves(network: Network, saved: Mapping[str, torch.dtype]) -> None:
    """Raise `InputError` where parameters have 16 bits and had not when saved, or the reverse."""
    for name in network.names:
        found, wanted = network.dtype_of(name), saved.get(name)
        if found != wanted and (found in HALF or wanted in HALF):
            expected = f"{name} of {wanted}" if wanted else f"{name} of at least 32 bits"
            remedy = f"Pass module.to({wanted or torch.float32})"
            fail("module", f"{expected}, as saved", found, remedy)


def check_base(found: BaseFacts, base: BaseFacts) -> None:
    """Raise `InputError` for a base model whose identity is another than the saved one.

    Args:
        found: its `base_identity`.
        base: the saved one.
    """
    name = f"the base model {base.model}".strip()
    expected, remedy = f"{name} that the posterior was fitted beside", "Load that base model"
    if found.shapes != base.shapes:
        fail("module", expected, "one with parameters of other names or shapes", remedy)
    if found.dtypes != base.dtypes:
        wanted, got = (", ".join(facts.dtypes) for facts in (base, found))
        fail("module", f"{name} in {wanted}", got, "Load it in that dtype")
    if found.values != base.values:
        fail("module", expected, "one with other values of its weights", remedy)
    if found.settings != base.settings:
        other = "other settings, such as the number of heads or the scaling of the adapters"
        fail("module", f"the configuration of {expected}", other, "Load both with their settings")


def refuse_module(facts: NetworkFacts, module: Any) -> NoReturn:
    """Raise `InputError` for a module of another architecture than that of `network_facts`.

    Args:
        facts: the result of `network_facts`.
        module: the module; a base model may lack the adapters beside which it was saved.
    """
    if facts.base is not None and not has_adapters(module):
        fail(
            "module",
            "a base model with the adapters that the posterior is over",
            f"{type(module).__name__} without adapters",
            f"Wrap it first: {_ADAPTED}",
        )
    saved = facts.architecture
    lines = zip_longest(
        saved.splitlines(), architecture_of(module).splitlines(), fillvalue="no such line"
    )
    expected, found = next((pair for pair in lines if pair[0] != pair[1]), (saved, saved))
    fail(
        "module",
        f"the saved architecture {_short(saved.partition(':')[0])}, with {_short(expected)!r}",
        repr(_short(found)),
        "Build it with the same layers, sizes and name of the class",
    )


def _short(text: str, width: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
