"""A module as a pure function of its weights: same values, same gradients, nothing touched."""

from __future__ import annotations

import copy
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from subbayes import InputError, InputTypeError, Network, Training
from subbayes.likelihoods import Gaussian
from subbayes.networks.outputs import CallError
from subbayes.training.trainer import train
from subbayes.utils.trees import n_rows, take

EACH = cases.one_per_network()
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch has no batching rule for weight norm


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "vectorising over weights failed")
        yield


def some_weights(network: Network, s: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(s, network.size, generator=generator, dtype=torch.float64)
    return network.weights + 0.3 * noise.to(network.weights)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def state_of(module: nn.Module) -> dict[str, Any]:
    """All of a module that the library has to leave alone."""
    return {
        "values": {k: v.clone() for k, v in module.state_dict().items()},
        "ids": [id(t) for t in [*module.parameters(), *module.buffers()]],
        "modes": [m.training for m in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "grads": [p.grad for p in module.parameters()],
        "random": torch.get_rng_state(),
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    values = all(torch.equal(a["values"][k], b["values"][k]) for k in a["values"])
    random = torch.equal(a["random"], b["random"])
    rest = ("ids", "modes", "requires_grad", "grads", "fastpath", "flash", "efficient", "math")
    return values and random and all(a[k] == b[k] for k in rest)


# --- values --------------------------------------------------------------------------------------


@cases.parametrize()
def test_equals_the_module_in_evaluation_mode(case):
    built = case.build()
    close(built.network(built.network.weights, built.inputs), built.call(), case.tolerance)


@cases.parametrize(*EACH)
def test_other_weights_equal_a_module_with_them(case):
    built = case.build()
    weights = some_weights(built.network, 1)[0]
    expected = built.call(built.network.module_with(weights))
    close(built.network(weights, built.inputs), expected, case.tolerance)
    moved = built.network.with_weights(weights)
    assert torch.equal(moved.weights, weights)
    close(moved(moved.weights, built.inputs), expected, case.tolerance)
    close(moved.flatten(built.network.module_with(weights)), weights, 0)


@cases.parametrize(*EACH)
def test_batched_equals_a_loop(case):
    built = case.build()
    weights = some_weights(built.network, 3)
    loop = torch.stack([built.network(w, built.inputs) for w in weights])
    close(built.network.batched(weights, built.inputs), loop, case.tolerance)


@cases.parametrize(*EACH)
def test_gradients_equal_those_of_the_module(case):
    built = case.build()
    weights = built.network.weights.clone().requires_grad_()
    built.network(weights, built.inputs).sin().sum().backward()
    built.call().sin().sum().backward()
    expected = built.network.flatten(
        {n: p.grad for n, p in built.module.named_parameters() if p.grad is not None}
    )
    close(weights.grad, expected, case.tolerance * 10)


@cases.parametrize(*EACH)
def test_rows_are_independent_of_their_batch(case):
    built = case.build()
    whole = built.network(built.network.weights, built.inputs)
    parts = [
        built.network(built.network.weights, take(built.inputs, slice(i, i + 1)))
        for i in range(n_rows(built.inputs))
    ]
    close(torch.cat(parts), whole, case.tolerance)


@given(st.integers(0, 2**12 - 1))
def test_masks_vary_only_the_selected_weights(bits):
    module = cases.mlp(1).double()
    mask = torch.tensor([bool(bits >> i & 1) for i in range(12)]).reshape(4, 3)
    if not mask.any():
        with pytest.raises(InputError, match="a mask that selects at least one weight"):
            Network(module, {"0.weight": mask})
        return
    network = Network(module, {"0.weight": mask})
    assert network.size == int(mask.sum())
    moved = network.module_with(network.weights + 1)
    assert torch.equal(moved[0].weight - module[0].weight.detach() > 0.5, mask)
    assert torch.equal(moved[0].weight[~mask], module[0].weight[~mask])
    assert torch.equal(moved[2].weight, module[2].weight)


def test_numpy_masks_are_accepted():
    network = Network(cases.mlp(1), {"2.weight": np.array([[True, False, False, True]])})
    assert network.size == 2


# --- what is selected ----------------------------------------------------------------------------


def test_weights_are_flattened_in_the_order_of_named_parameters():
    module = cases.mlp(2)
    network = Network(module)
    assert torch.equal(network.weights, nn.utils.parameters_to_vector(module.parameters()))
    assert network.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert network.size == 4 * 3 + 4 + 4 * 2 + 2
    assert repr(network) == "Network(Sequential, 26 weights in 4 parameters)"


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("all", ("0.weight", "0.bias", "2.weight", "2.bias")),
        ("last-layer", ("2.weight", "2.bias")),
        ("*.bias", ("0.bias", "2.bias")),
        (["2.*", "0.bias"], ("0.bias", "2.weight", "2.bias")),
        (lambda name, p: p.numel() > 4, ("0.weight",)),
    ],
)
def test_selections(parameters, names):
    assert Network(cases.mlp(1), parameters).names == names


def test_frozen_parameters_are_constant():
    module = cases.frozen_first(1)
    network = Network(module)
    assert network.names == ("2.weight", "2.bias")
    assert torch.equal(network.module_with(network.weights + 1)[0].weight, module[0].weight)
    assert set(network.frozen) == {"0.weight", "0.bias"}


def test_tied_parameters_count_once_and_stay_tied():
    module = cases.Tied(1)
    network = Network(module)
    assert network.size == sum(p.numel() for p in module.parameters())
    moved = network.module_with(network.weights + 1)
    assert moved.second.weight is moved.first.weight
    assert Network(module, "second.*").names == ("first.weight",)


def test_last_layer_includes_a_tied_weight():
    module = cases.Tied(3)
    del module.head
    assert Network(module, "last-layer").names == ("first.weight",)


def test_last_layer_with_weight_norm():
    network = Network(cases.weight_normed(1), "last-layer")
    assert network.names == (
        "2.bias",
        "2.parametrizations.weight.original0",
        "2.parametrizations.weight.original1",
    )


def test_last_layer_of_a_single_layer():
    assert Network(nn.Linear(2, 1), "last-layer").size == 3
    assert Network(nn.utils.parametrizations.weight_norm(nn.Linear(2, 1)), "last-layer").size == 4


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_deprecated_weight_norm_after_a_forward_pass():
    module = cases.mlp(1).double()
    nn.utils.weight_norm(module[0])
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module(x)  # leaves a tensor with a history on the module
    network = Network(module)
    weights = some_weights(network, 2)
    batched = network.batched(weights, x)
    for w, outputs in zip(weights, batched, strict=True):
        close(network.module_with(w)(x), outputs, 1e-12)
    close(network(network.weights, x), module(x), 1e-12)


def test_float16_and_mixed_dtypes_are_kept():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1).double())
    network = Network(module, output=lambda out: out)
    assert network.dtype == torch.float64
    moved = network.module_with(network.weights + 1)
    assert [p.dtype for p in moved.parameters()] == [p.dtype for p in module.parameters()]
    half = Network(nn.Linear(3, 1).bfloat16())
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert half.dtype == half(half.weights, x).dtype == torch.float32
    assert half.module_with()(x).dtype == torch.bfloat16


def test_to_another_dtype_keeps_selection_frozen_values_and_output():
    built = cases.Case("masked", "gaussian").build()
    single = built.network.to("cpu", torch.float32)
    assert single.size == built.network.size
    assert single.dtype == torch.float32
    expected = built.call().float()
    close(single(single.weights, built.inputs.float()), expected, 1e-5)
    moved = built.network.with_weights(built.network.weights + 1)
    close(moved.to("cpu", torch.float32).weights, moved.weights.float(), 0)


# --- nothing of the user's changes ---------------------------------------------------------------


def use_everything(built: cases.Built) -> None:
    network, weights = built.network, some_weights(built.network, 2)
    network.check(built.inputs)
    network.batched(weights, built.inputs)
    network.with_weights(weights[0])
    network.refresh_batchnorm(weights[0], iter([(built.inputs, None)]))
    network.module_with(weights[0])
    network.flatten(built.module)
    network.to("cpu", torch.float32)
    loss = network(weights[0].requires_grad_(), built.inputs).sum()
    loss.backward()


@cases.parametrize(*EACH)
def test_module_and_global_state_are_unchanged(case):
    built = case.build()
    built.module.train()
    list(built.module.children())[0].eval()
    before = state_of(built.module)
    Network(built.module, **cases.NETWORKS[case.network].options)
    use_everything(built)
    assert same_state(before, state_of(built.module))


@cases.parametrize(*EACH)
def test_network_ignores_later_changes_of_the_module(case):
    built = case.build()
    before = built.network(built.network.weights, built.inputs).clone()
    with torch.no_grad():
        for tensor in [*built.module.parameters(), *built.module.buffers()]:
            tensor.fill_(2)
    built.module.train()
    built.module.requires_grad_(False)
    assert torch.equal(built.network(built.network.weights, built.inputs), before)


def test_copies_are_independent():
    network = Network(cases.CNN(2))
    before = network.weights.clone()
    copies = [network.with_weights(network.weights), network.with_buffers({})]
    made = network.module_with()
    with torch.no_grad():
        for p in [*made.parameters(), *made.buffers()]:
            p.zero_()
    copies[0].weights.zero_()
    assert torch.equal(network.weights, before)
    assert not torch.equal(network.frozen["norm.running_var"], torch.zeros(2))


def test_module_with_keeps_requires_grad_in_evaluation_mode():
    module = cases.with_dropout(1)
    module[0].requires_grad_(False)
    made = Network(module).module_with()
    assert not any(m.training for m in made.modules())
    assert [p.requires_grad for p in made.parameters()] == [False, False, True, True]


class Failing(nn.Module):
    """Fails on request after touching every switch a call may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.fail = nn.Linear(2, 1), False

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 5:
            raise KeyError("far away")
        return self.head(x)


def test_exceptions_in_a_call_restore_the_state():
    network = Network(Failing())
    x = torch.ones(2, 2)
    before, state = network(network.weights, x), state_of(network._module)
    for call in (network, lambda w, x: network.batched(w[None], x)):
        with pytest.raises(KeyError):
            call(network.weights + 1, x * 9)
    assert same_state(state, state_of(network._module))
    assert torch.equal(network(network.weights, x), before)
    with pytest.raises(InputError, match="^inputs: .*'far away'"):
        network.check(x * 9)


# --- BatchNorm -----------------------------------------------------------------------------------


def test_batchnorm_uses_stored_statistics_by_default():
    built = cases.Case("cnn", "gaussian").build()
    norm = built.module.norm
    hidden = built.module.conv(built.inputs)
    scaled = (hidden - norm.running_mean[:, None, None]) / (
        norm.running_var[:, None, None] + norm.eps
    ).sqrt()
    expected = built.module.head(torch.relu(scaled).mean((2, 3)))
    close(built.network(built.network.weights, built.inputs), expected, 1e-12)


def test_refreshed_on_one_batch_equals_training_mode():
    built = cases.Case("cnn", "gaussian").build()
    refreshed = built.network.refresh_batchnorm(built.network.weights, iter([(built.inputs, None)]))
    module = copy.deepcopy(built.module).train()
    count = built.inputs.shape[0] * 9
    unbiased = refreshed.with_buffers(
        {"norm.running_var": refreshed.frozen["norm.running_var"] * (count - 1) / count}
    )
    close(unbiased(unbiased.weights, built.inputs), module(built.inputs), 1e-12)


def test_refreshing_without_batchnorm_reads_no_data():
    network = Network(cases.mlp(1))
    refreshed = network.refresh_batchnorm(network.weights + 1, iter(()))
    assert torch.equal(refreshed.weights, network.weights + 1)


# --- vectorising ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, a in cases.NETWORKS.items() if not a.vmaps])
def test_unvectorisable_modules_use_a_loop_with_one_warning(name):
    built = cases.Case(name, "gaussian").build()
    weights = some_weights(built.network, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            outputs = built.network.batched(weights, built.inputs)
    assert len(caught) == 1
    assert "vectorising over weights failed" in str(caught[0].message)
    assert "\n" not in str(caught[0].message)
    close(outputs[1], built.network(weights[1], built.inputs), 1e-12)


def test_errors_of_the_module_do_not_disable_vectorising():
    network = Network(cases.mlp(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            network.batched(network.weights[None], torch.zeros(2, 5))


# --- bad input -----------------------------------------------------------------------------------


class Returns(nn.Module):
    """Whatever the function makes of the right outputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.body, self.function = nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.body(x))


def one_line(excinfo: pytest.ExceptionInfo) -> str:
    text = str(excinfo.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


@pytest.mark.parametrize(
    "function",
    [lambda out: (out, out), lambda out: None, lambda out: {"logits": out}, lambda out: [out]],
)
def test_modules_that_do_not_return_a_tensor_raise(function):
    network = Network(Returns(function))
    with pytest.raises(InputTypeError, match="module: expected one tensor as its output") as e:
        network.check(torch.zeros(4, 3))
    assert "Pass output=" in one_line(e)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda out: out.sum(), "()"),
        (lambda out: out[None], "(1, 2, 2)"),
        (lambda out: out.reshape(-1), "(4,)"),
    ],
)
def test_outputs_of_another_shape_raise(function, shape):
    network = Network(Returns(function))
    with pytest.raises(InputError, match="module: expected outputs of shape") as e:
        network.check(torch.zeros(4, 3))
    assert shape in one_line(e)


def test_labels_as_outputs_raise():
    network = Network(Returns(lambda out: out.argmax(-1)))
    with pytest.raises(InputError, match="module: expected real numbers as outputs") as e:
        network.check(torch.zeros(4, 3))
    assert "not labels" in one_line(e)


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (torch.zeros(4, 3, dtype=torch.int64), r"rows of shape \(3,\), torch.int64.*\.float\(\)"),
        (torch.zeros(4, 5), r"rows of shape \(5,\), torch.float32"),
        (torch.zeros(4, 3, dtype=torch.float64), r"torch.float64.*\.to\(torch.float32\)"),
    ],
)
def test_invalid_inputs_raise(inputs, what):
    with pytest.raises(InputError, match="inputs: expected what the module takes") as e:
        Network(cases.mlp(1)).check(inputs)
    one_line(e)
    assert e.match(what)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda self, x: self.missing(x), "AttributeError: .* has no attribute 'missing'"),
        (lambda self, x: {"a": x}["b"], "KeyError: 'b'"),
        (lambda self, x: raised(ValueError("wrong season")), "ValueError: wrong season"),
        (lambda self, x: raised(RuntimeError("no cache")), "RuntimeError: no cache"),
        (lambda self, x: self.head(x, x), "TypeError: .* positional argument"),
        (lambda self, x: None + x, "TypeError: unsupported operand"),
        (lambda self, x: 1 / 0 + x, "ZeroDivisionError: division by zero"),
    ],
)
def test_errors_of_a_forward_are_its_own(run, reason):
    class Wrong(Failing):
        def forward(self, x: Tensor) -> Tensor:
            return run(self, x)

    with pytest.raises(CallError) as e:
        Network(Wrong()).check(torch.zeros(4, 2))
    assert e.value.argument == "inputs"
    assert re.search(rf"raised {reason}", one_line(e))
    assert type(e.value.__cause__).__name__ == reason.partition(":")[0]


def raised(error):
    raise error


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda self, x: self.head(x[:, :1]), "RuntimeError: mat1 and mat2"),
        (lambda self, x: x[:, 7:8] + x[:, 7], "IndexError: index 7"),
        (lambda self, x: self.head(x.reshape(4, 5)), "RuntimeError: shape"),
        (lambda self, x: unpacked(x), "ValueError: not enough values to unpack"),
    ],
)
def test_operations_that_fail_name_the_inputs_and_the_exception(run, reason):
    class Wrong(Failing):
        def forward(self, x: Tensor) -> Tensor:
            return run(self, x)

    with pytest.raises(CallError) as e:
        Network(Wrong()).check(torch.zeros(4, 2))
    assert e.value.argument == "inputs"
    assert f"for which its forward raised {reason}" in one_line(e)
    assert type(e.value.__cause__).__name__ == reason.partition(":")[0]


def unpacked(x):
    rows, channels, height = x.shape
    return x.reshape(rows, channels * height)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (lambda out: out.logits, "AttributeError: 'Tensor' object has no attribute 'logits'"),
        (lambda: None, "TypeError: "),
    ],
)
def test_errors_of_output_are_its_own(output, reason):
    with pytest.raises(InputError) as e:
        Network(nn.Linear(2, 1), output=output).check(torch.zeros(4, 2))
    assert "output: expected a function of what the module returns, a Tensor, got " in one_line(e)
    assert reason in str(e.value)
    assert e.value.__cause__ is not None


def test_assertions_without_a_message_are_named():
    class Asserting(Failing):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    with pytest.raises(InputError, match="AssertionError"):
        Network(Asserting()).check(torch.zeros(4, 2))


def test_inputs_on_another_device_raise():
    with pytest.raises(
        InputError, match="inputs: expected tensors on cpu, where the module is, got meta"
    ) as e:
        Network(cases.mlp(1)).check(torch.zeros(4, 3, device="meta"))
    assert ".to(device)" in one_line(e)


def test_random_modules_raise():
    torch.manual_seed(0)
    module = Returns(lambda out: nn.functional.dropout(out, 0.5))
    before = torch.get_rng_state()
    with pytest.raises(InputError, match="the same outputs at each call") as e:
        Network(module).check(torch.ones(4, 3))
    assert "training=self.training" in one_line(e)
    assert torch.equal(before, torch.get_rng_state())


class WritesIntoInputs(Failing):
    def forward(self, x: Tensor) -> Tensor:
        x /= 255
        return self.head(x)


def test_modules_that_modify_their_inputs_raise():
    x = torch.arange(6.0).reshape(3, 2)
    with pytest.raises(
        InputError, match="module: expected a call that does not change its inputs"
    ) as e:
        Network(WritesIntoInputs()).check(x)
    one_line(e)
    assert torch.equal(x, torch.arange(6.0).reshape(3, 2))


def test_wrapped_modules_raise():
    with pytest.raises(
        InputTypeError,
        match="module: expected a plain torch.nn.Module, got .* Pass the module it was made from",
    ):
        Network(nn.DataParallel(cases.mlp(1)))


def test_compiled_modules_are_unwrapped():
    module, validates = cases.mlp(1), torch.distributions.Distribution._validate_args
    network = Network(torch.compile(module))
    torch.distributions.Distribution.set_default_validate_args(validates)  # torch turns it off
    assert network.names == Network(module).names
    assert network.architecture == Network(module).architecture


class AcrossTheBatch(nn.Module):
    """Attention over observations, since batch_first was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0][:, 0])


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (AcrossTheBatch(), (5, 3, 4)),
        (
            nn.Sequential(
                nn.Conv1d(3, 3, 1),
                nn.BatchNorm1d(3, track_running_stats=False),
                nn.Flatten(),
                nn.Linear(12, 1),
            ),
            (5, 3, 4),
        ),
    ],
)
def test_modules_that_mix_observations_raise(module, shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="outputs of a row that depend on that row alone") as e:
        Network(module).check(x)
    assert "batch_first=True" in one_line(e)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Network(nn.ReLU()), "a module without parameters"),
        (lambda: Network(nn.Linear(2, 1).requires_grad_(False)), "all have requires_grad=False"),
        (lambda: Network(nn.LazyLinear(1)), "lazy parameters"),
        (lambda: Network(cases.mlp(1), "nothing.*"), r"'nothing\.\*'.*Trainable are: 0\.weight"),
        (lambda: Network(cases.mlp(1), []), "a pattern that selects"),
        (lambda: Network(cases.mlp(1), lambda name, p: False), "a pattern that selects"),
        (lambda: Network(cases.frozen_first(1), "0.*"), "Trainable are: 2.weight"),
        (lambda: Network(cases.mlp(1), {"9.weight": torch.ones(1)}), r"got '9\.weight'\. Did"),
        (
            lambda: Network(cases.mlp(1), {"0.bias": torch.ones(3, dtype=torch.bool)}),
            r"parameters\['0.bias'\]: expected a boolean mask of shape \(4,\), "
            r"got torch.bool of shape \(3,\)",
        ),
        (lambda: Network(cases.mlp(1), {"0.bias": torch.ones(4)}), "got torch.float32"),
    ],
)
def test_invalid_selections_raise(make, what):
    with pytest.raises(InputError, match=what) as e:
        make()
    one_line(e)


@pytest.mark.usefixtures("unchecked")
def test_arguments_of_the_wrong_type_raise():
    with pytest.raises(InputTypeError, match="module: expected a torch.nn.Module, got function"):
        Network(cases.mlp)  # type: ignore[arg-type]
    with pytest.raises(InputTypeError, match="parameters: expected names or patterns.*got int"):
        Network(cases.mlp(1), 3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(), (12,), (2, 21), (0,)])
def test_weights_of_another_size_raise(shape):
    network = Network(cases.mlp(1))
    weights = torch.zeros(shape)
    for call in (
        lambda: network(weights, torch.zeros(2, 3)),
        lambda: network.module_with(weights),
        lambda: network.with_weights(weights),
    ):
        with pytest.raises(InputError, match="weights: expected 21 entries, got shape"):
            call()


def test_flattening_another_architecture_raises():
    network = Network(cases.mlp(1))
    with pytest.raises(
        InputError,
        match=r"source: expected a parameter 2.weight of shape "
        r"\(1, 4\), got \(2, 4\)",
    ):
        network.flatten(cases.mlp(2))
    with pytest.raises(InputError, match="got nothing"):
        network.flatten({})


def test_modules_that_cannot_be_copied_raise():
    module = cases.mlp(1)
    module.log = open(__file__)  # noqa: SIM115
    with pytest.raises(InputError, match="module: expected a module that can be copied") as e:
        Network(module)
    module.log.close()
    one_line(e)


def test_each_pattern_selects_a_parameter():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"got '2.wieght'. Did you mean '2.weight'"):
        Network(net, ["0.weight", "2.wieght"])
    with pytest.raises(InputError, match=r"got '2.wieght'. Did you mean '2.weight'"):
        Network(net, {"2.wieght": torch.ones(1, 4, dtype=torch.bool)})
    assert Network(net, ["0.weight", "2.*"]).size == 12 + 5


class LastState(nn.Module):
    """An LSTM whose last output is read by a linear layer."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = (
            nn.LSTM(1, 4, 2, batch_first=True, bidirectional=True),
            nn.Linear(8, 1),
        )

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0][:, -1])


def test_float32_lstms_have_vectorised_gradients():
    torch.manual_seed(0)
    module, x = LastState(), torch.randn(6, 3)
    network = Network(module)
    assert torch.backends.mkldnn.enabled

    def total(w):
        return network(w, x).square().sum()

    weights = torch.stack([network.weights, 1.1 * network.weights])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of vmap, for operations that it runs in a loop
        found = torch.func.vmap(torch.func.grad(total))(weights)
    assert torch.backends.mkldnn.enabled
    for w, gradient in zip(weights, found, strict=True):
        own = copy.deepcopy(module)
        nn.utils.vector_to_parameters(w, own.parameters())
        own(x).square().sum().backward()
        expected = nn.utils.parameters_to_vector(p.grad for p in own.parameters())
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


class Registered(nn.Module):
    """A layer with two names, and another with its weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.again, self.b.weight = self.a, self.a.weight

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.again(torch.tanh(self.a(x)))))))


def test_layers_with_two_names_stay_parameters_and_are_trained():
    torch.manual_seed(0)
    module, x = Registered(), torch.randn(8, 3)
    network = Network(module)
    assert network.size == 3 * 3 + 3 + 3 + 4
    weights = torch.randn(network.size)
    own = copy.deepcopy(module)
    with torch.no_grad():
        for name, values in network.unflatten(weights).items():
            own.get_parameter(name).copy_(values)
    for _ in range(2):
        torch.testing.assert_close(network(weights, x), own(x))
    made = network.module_with()
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in made.parameters())
    trained = train(module, Gaussian(0.1), (x, x[:, 0]), Training(epochs=3), progress=False)
    assert (trained.network.weights != network.weights).all()


def test_frozen_parameters_are_shared_on_request():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    module[0].requires_grad_(False)
    for copied in (True, False):
        network = Network(module, copy_frozen=copied)
        frozen = network.frozen["0.weight"].data_ptr()
        assert (frozen == module[0].weight.data_ptr()) == (not copied)
        assert not dict(network.module_with().named_parameters())["0.weight"].requires_grad


def test_threads_leave_the_checks_of_sparse_tensors_as_they_were():
    """The switch is global: threads that set it at once would restore what another had set."""
    before = torch.sparse.check_sparse_tensor_invariants.is_enabled()

    def evaluate(width):
        net = nn.Sequential(nn.Linear(width, 50), nn.Tanh(), nn.Linear(50, 1))
        Network(net).check(torch.zeros(2, width))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(evaluate, range(1, 81)))
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled() == before
