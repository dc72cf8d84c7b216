r"""A module whose weights FSDP2 (`fully_shard`) divides among processes, as a function f(x; w).

FSDP2 modules can be neither copied nor called by `torch.func.functional_call`, and have no forward
mode. So the shards of the user's own module are set in place for each evaluation, $w_r = \hat w_r +
P_r z$ in process r, and restored afterwards, bit for bit, also after an error. All processes make
the same calls, one weight vector after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subbayes.distributed.sharded_weights import (
    ShardLayout,
    is_sharded,
    joined_processes,
    reshard,
    shard_layout,
    without_shards,
)
from subbayes.likelihoods import Likelihood
from subbayes.likelihoods.target_parts import one_copy_log_prob
from subbayes.networks.adapters.in_use import replaced_names
from subbayes.networks.adapters.names import base_names_of
from subbayes.networks.embeddings import check_embeddings
from subbayes.networks.global_state import outside_inference_mode
from subbayes.networks.identity.architecture import architecture_of
from subbayes.networks.layer_kinds import fixed_batch_norms, layers_in_training
from subbayes.networks.network import Network, arguments
from subbayes.networks.selection import Selection, requiring_gradients, select, selects_adapters
from subbayes.networks.token_outputs import with_decoder
from subbayes.networks.tracing.memory import return_memory
from subbayes.networks.validation import fail_of_gradients
from subbayes.utils.checks import fail
from subbayes.utils.seeding import torch_lock
from subbayes.utils.types import Inputs, OutputFunction, Outputs, Targets


class ShardedNetwork(Network):
    r"""A module sharded by `fully_shard`, as a function of the shard $w_r$ of this process.

    It is evaluated by all processes at the same time. The module is the user's own: within a call
    it has other weights and is in evaluation mode, after it everything is as before.

    Args:
        module: a module to which `fully_shard` was applied, with a mesh of all processes.
        parameters: which trainable parameters are weights, as for `Network`, but no masks.
        output: selects the output tensor from the return value of the module.

    Attributes:
        layout: which weights this process holds.

    Raises:
        InputError: parameters that are not sharded beside others, another mesh, masks of
            parameters, or a process that has not joined the others.
    """

    is_sharded = True

    @outside_inference_mode
    def __init__(
        self, module: nn.Module, parameters: Selection = "all", output: OutputFunction | None = None
    ) -> None:
        processes = joined_processes()
        return_memory()
        self.output = with_decoder(module, output)
        self.selection, self.copy_frozen = parameters, False
        self.in_training = layers_in_training(module)
        self.fixed_norms = fixed_batch_norms(module)
        reshard(module)
        if isinstance(parameters, Mapping):
            fail("parameters", "names of whole parameters of a sharded module", "masks")
        chosen = select(without_shards(module), parameters)
        check_embeddings(module, chosen, copied=False)
        named = dict(module.named_parameters())
        self._module = module
        self._set_parameters(named, chosen)
        self.layout: ShardLayout = shard_layout(module, self.names, processes)
        self.tied, self._has_lstm, self.shared_weights = {}, False, None
        has_base = selects_adapters(parameters)
        self.unused = frozenset(replaced_names(module) if has_base else ())
        frozen = [name for name in named if name not in chosen and name not in self.unused]
        self.base_names = base_names_of(named, frozen) if has_base else ()
        self._frozen_layout = shard_layout(module, frozen, processes)
        self._frozen = dict(module.named_buffers())
        self.weights = self.layout.flatten(named)

    @property
    def size(self) -> int:
        """Number of selected weights D of all processes."""
        return self.layout.size

    @property
    def is_traced(self) -> bool:
        """Never: FSDP2 gathers weights in hooks."""
        return False

    def __repr__(self) -> str:
        held = f"{self.layout.local_size} of {self.size} weights"
        return f"ShardedNetwork({type(self._module).__name__}, {held})"

    # --- calls ----------------------------------------------------------------------------------

    @contextmanager
    def _at(self, weights: Float[Tensor, "D_r"], gradient: bool) -> Iterator[dict[str, Any]]:
        """Within it the module has other weights, no gradients, and is in evaluation mode.

        The weights require gradients also in calls without: FSDP2 prepares them in the first call.
        """
        self._check_size(weights)
        with torch_lock, torch.inference_mode(False):
            reshard(self._module)
            named: dict[str, Any] = dict(self._module.named_parameters())
            held, slopes = self.layout.flatten(named), {n: p.grad for n, p in named.items()}
            modes = [(part, part.training) for part in self._module.modules()]
            failed = True
            try:
                for part, _ in modes:
                    part.training = False
                for parameter in named.values():
                    parameter.grad = None
                self.layout.write(named, weights)
                with (
                    requiring_gradients(self._module, self.names),
                    torch.enable_grad() if gradient else torch.no_grad(),
                ):
                    yield named
                failed = False
            finally:
                reshard(self._module, after_error=failed)
                self.layout.write(named, held)
                for name, parameter in named.items():
                    parameter.grad = slopes[name]
                for part, training in modes:
                    part.training = training

    def __call__(self, weights: Float[Tensor, "D_r"], inputs: Inputs) -> Outputs:
        """Outputs f(x; w) of shape (N, C), without gradients; see `value_and_gradient`."""
        with self._at(weights, gradient=False):
            return self._outputs(inputs)

    def _outputs(self, inputs: Inputs) -> Outputs:
        args, kwargs = arguments(inputs)
        return self.as_outputs(self._module(*args, **kwargs), inputs)

    def batched(self, weights: Float[Tensor, "S D_r"], inputs: Inputs) -> Outputs:
        """Outputs of S weight vectors on the same inputs, one after the other."""
        return torch.stack([self(row, inputs) for row in weights])

    def pull(
        self, weights: Float[Tensor, "D_r"], inputs: Inputs, score: Callable[[Tensor], Outputs]
    ) -> tuple[Outputs, Float[Tensor, "D_r"]]:
        r"""Outputs, and the shard of $\sum_s J_s^\top u_s$ over all processes s.

        Args:
            weights: the shard of the weights.
            inputs: rows of this process; others have other rows.
            score: the vectors u of this process from its outputs.

        Raises:
            InputError: outputs that do not depend on the weights as far as autograd sees.
        """
        with self._at(weights, gradient=True) as named:
            outputs = self._outputs(inputs)
            if outputs.requires_grad:
                outputs.backward(score(outputs.detach()))
            if all(named[name].grad is None for name in self.names):
                fail_of_gradients()
            # FSDP2 averages gradients over processes
            gradient = self.layout.gradient(named).mul_(joined_processes().count)
            return outputs.detach(), gradient

    def density(self, likelihood: Likelihood, what: str) -> ShardedDensity:
        """The log-likelihood of rows as `Posterior` evaluates it."""
        return ShardedDensity(self, likelihood, what)

    # --- identity -------------------------------------------------------------------------------

    @property
    def module_without_shards(self) -> nn.Module:
        """The module with the classes from before `fully_shard`, to look at, not to call."""
        return without_shards(self._module)

    @property
    def architecture(self) -> str:
        """The printed form of the module, with a digest of frozen weights of all processes."""
        printed = architecture_of(self.module_without_shards)
        if not self._frozen_layout.names:
            return printed
        named = dict(self._module.named_parameters())
        digest = self._frozen_layout.digest_of(named, joined_processes())
        return f"{printed} beside frozen weights {digest}"

    def _check_size(self, weights: Tensor) -> None:
        if weights.shape != (self.layout.local_size,):
            fail(
                "weights",
                f"{self.layout.local_size} entries, the shard of this process",
                f"shape {tuple(weights.shape)}",
                "Use ShardedRandomSubspace(network, rank)",
            )

    # --- what needs all weights in one process; the module cannot be copied either ---------------

    def flatten(self, source: Any) -> NoReturn:
        """Refused: no process holds all weights."""
        fail(
            "module",
            "weights in one process for a flat vector of all weights",
            "weights sharded by fully_shard",
            "Use subspace='random' and a sampler, or a module that is not sharded",
        )

    def unflatten(self, weights: Tensor) -> NoReturn:
        """Refused: no process holds all weights."""
        self.flatten(weights)


def plain_module(network: Network) -> nn.Module:
    """The module of a network to look at, not to call if its weights are sharded."""
    if isinstance(network, ShardedNetwork):
        return network.module_without_shards
    return network.module_with()


class ShardedDensity:
    """The log-likelihood of rows, and its gradient, for a `ShardedNetwork`.

    It takes shards of weight vectors (c, D_r), inputs and targets. Targets of None mean rows that
    do not count: they are evaluated because FSDP2 needs the same calls in all processes.

    Args:
        network: the network.
        likelihood: p(y | f).
        what: "value" (sums over rows), "pointwise" (one copy of each row) or "grad" (gradients of
            the sums over the rows of all processes, and the sums over those of this one).
    """

    mode = "eager"

    def __init__(self, network: ShardedNetwork, likelihood: Likelihood, what: str) -> None:
        self.network, self.likelihood, self.what = network, likelihood, what

    def use_eager(self, reason: str) -> None:
        """It always is."""

    def __call__(self, weights: Float[Tensor, "c D_r"], inputs: Inputs, y: Targets | None) -> Any:
        """Evaluate one weight vector after the other."""
        if self.what != "grad":
            return torch.stack([self._terms(self.network(w, inputs), y) for w in weights])
        found = [self.network.pull(w, inputs, lambda f: self._score(f, y)) for w in weights]
        values = torch.stack([self._terms(outputs, y).sum() for outputs, _ in found])
        return torch.stack([gradient for _, gradient in found]), values

    def _terms(self, outputs: Float[Tensor, "n C"], y: Targets | None) -> Float[Tensor, "*n"]:
        if y is None:
            terms = outputs.new_zeros(len(outputs), dtype=torch.float64)
        elif self.what == "pointwise":
            terms = one_copy_log_prob(self.likelihood, outputs, y).double()
        else:
            terms = self.likelihood.log_prob(outputs, y).double()
        return terms.sum() if self.what == "value" else terms

    def _score(self, outputs: Float[Tensor, "n C"], y: Targets | None) -> Float[Tensor, "n C"]:
        return torch.zeros_like(outputs) if y is None else self.likelihood.score(outputs, y)


def network_of(
    module: nn.Module, parameters: Selection = "all", output: OutputFunction | None = None
) -> Network:
    """The module as a `Network`, or as a `ShardedNetwork` if its weights are sharded.

    Args:
        module: the module.
        parameters: which trainable parameters are weights.
        output: selects the output tensor from the return value of the module.

    Example:
        >>> network_of(nn.Linear(2, 1))
        Network(Linear, 3 weights in 2 parameters)
    """
    if isinstance(module, nn.Module) and is_sharded(module):
        return ShardedNetwork(module, parameters, output)
    return Network(module, parameters, output)
