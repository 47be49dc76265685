"""Rules of operators that compute: which dimensions they find to be equal, and which they hold whole."""

import re
from collections.abc import Sequence

import torch

from incofl.models.infer import views
from incofl.models.infer.dims import Call, Dim, Dims, Rule, Value, hold, length, new, news, reshape, spread, unify

HEAD = "the scale of an attention depends on it"


def elementwise(call: Call) -> Dims:
    """Any number of tensors, broadcast."""
    return spread(len(call.shape), *call.values)


def same(call: Call) -> Dims:
    """The result has the dimensions of the first tensor."""
    return call.values[0]


def ordered(call: Call) -> Dims:
    """Positions of some dimensions depend on each other: softmax, running sums, flips."""
    value = call.values[0]
    which = call["dims"] if call["dim"] is None else [call["dim"]]
    call.hold(*(value[at] for at in which or range(len(value))))
    return value


def reduction(call: Call) -> list[Dims]:
    """Dimensions disappear, or have length 1 afterwards."""
    value, dim = call.values[0], call["dim"]
    which = [dim] if isinstance(dim, int) else dim or range(len(value))
    gone = {at % len(value) for at in which}
    if len(call.shapes) > 1 or call.name in ("aten.argmax", "aten.argmin"):  # where the largest is, too
        call.hold(*(value[at] for at in gone))
    kept = [() if at in gone else dim for at, dim in enumerate(value) if at not in gone or call["keepdim"]]
    return [tuple(kept)] * len(call.shapes)


def contract(call: Call, equation: str, factors: Sequence[Value], *added: Value) -> Dims:
    """A sum of products by the letters of an equation, as in einsum, and tensors that are added to it.

    Where two factors depend on the input, as in an attention, what is summed over is whole.
    """
    left, _, right = equation.partition("->")
    letters: dict[str, Dim] = {}
    batches: list[Dims] = []
    for word, value in zip(left.split(","), factors, strict=True):
        head, _, tail = word.partition("...")
        end = len(value) - len(tail)
        for letter, dim in zip(head + tail, value[: len(head)] + value[end:], strict=True):
            unify(letters.setdefault(letter, dim), dim)
        batches.append(value[len(head) : end])
    if sum(not value.learned for value in factors) > 1:
        hold(*(dim for letter, dim in letters.items() if letter not in right), reason=HEAD)
    head, _, tail = right.partition("...")
    first, last = ([letters[letter] for letter in part] for part in (head, tail))
    batch = spread(len(call.shape) - len(first) - len(last), *batches)
    return spread(len(call.shape), (*first, *batch, *last), *added)


def linear(call: Call) -> Dims:
    """The last dimension of the input against the columns of the weight."""
    x, weight, *bias = call.values
    return contract(call, "...i,oi->...o", [x, weight], *bias)


def product(call: Call) -> Dims:
    """Matrix products, of vectors too."""
    *added, a, b = call.values
    i, k = "i" if len(a) > 1 else "", "k" if len(b) > 1 else ""
    return contract(call, f"{'...' if i else ''}{i}j,{'...' if k else ''}j{k}->...{i}{k}", [a, b], *added)


def einsum(call: Call) -> Dims | None:
    """By its equation."""
    equation = call["equation"].replace(" ", "")
    return contract(call, equation, call.values) if "->" in equation else None


def convolution(call: Call) -> Dims:
    """Kernels are whole; a filter per channel makes outputs follow inputs; other groups are whole."""
    x, weight, groups = call["input"], call["weight"], call["groups"]
    transposed = "transpose" in call.name
    spatial = len(weight) - 2
    hold(*weight[2:])
    outputs, inputs = (weight[1], weight[0]) if transposed else (weight[0], weight[1])
    channels = x[-1 - spatial]
    if groups == 1:
        unify(channels, inputs)
    elif not transposed and length(inputs) == 1:
        each = length(outputs) // groups  # filters per channel, next to each other
        unify((*channels, *new(each)), outputs)
    else:
        call.hold(channels, *weight, what="has groups")
        outputs = new(call.shape[-1 - spatial])
    if call["bias"] is not None:
        unify(call["bias"][0], outputs)
    return (*x[: -1 - spatial], outputs, *news(call.shape[-spatial:]))


def pooling(call: Call) -> list[Dims]:
    """Pixels, or positions of a sequence, become fewer or more; how many dimensions of them is in the name."""
    spatial = int(next(letter for letter in call.name if letter.isdigit()))
    x = call.values[0]
    call.hold(*x[-spatial:])
    return [(*x[:-spatial], *news(shape[-spatial:])) for shape in call.shapes]


def channel_norm(call: Call) -> Dims:
    """Batch and instance norms, slopes of a PReLU: all vectors have the channels of the input."""
    x, *others = call.values
    for value in others:
        unify(x[1], value[0])
    return x


def group_norm(call: Call) -> Dims:
    """The number of groups stays, so each group loses the same channels."""
    channels, groups = call.values[0][1], call["num_groups"]
    outer, _ = reshape((channels,), (groups, length(channels) // groups))
    call.hold(outer, what="has a fixed number of groups")
    return channel_norm(call)


def embedding(call: Call) -> Dims:
    """Rows are looked up by number, so all are needed."""
    weight, indices = call["weight"], call["indices"]
    hold(weight[0])
    return (*indices, weight[1])


def attention(call: Call) -> Dims:
    """Heads of queries, keys and values agree; their width is whole."""
    q, k, v, *mask = call.values
    hold(q[-1], k[-1], v[-1], reason=HEAD)
    unify(q[-1], k[-1])
    spread(len(k) - 1, k[:-1], v[:-1])
    for a, b in zip(q[:-2], k[:-2], strict=True):
        if (many := length(a)) != (few := length(b)):  # heads that share keys and values
            a, shared = reshape((a,), (few, many // few))
            call.hold(shared, what="shares keys between heads")
        unify(a, b)
    spread(len(q), (*q[:-1], k[-2]), *mask)
    return (*q[:-1], v[-1])


def recurrent(call: Call) -> list[Dims] | None:
    """LSTM, GRU and plain layers: gates are copies of the hidden state, which all layers share."""
    if "params" not in call.arguments or call["data"] is not None:  # packed sequences
        return None
    gates = {"aten.lstm": 4, "aten.gru": 3}.get(call.name, 1)
    x, states = call["input"], call["hx"]
    states = states if isinstance(states, list) else [states]
    hidden = states[0][-1]
    if any(length(state[-1]) != length(hidden) for state in states):
        return None  # a projected state
    ways = 2 if call["bidirectional"] else 1
    output = (*new(ways), *hidden)
    matrices = [value for value in call["params"] if len(value) == 2]
    for at, (of_input, of_state) in enumerate(zip(matrices[::2], matrices[1::2], strict=True)):
        unify(of_input[1], x[-1] if at < ways else output)
        unify(of_state[1], hidden)
    for value in call["params"]:
        unify(value[0], (*new(gates), *hidden))
    for state in states:
        hold(*state[:2])
        unify(state[-1], hidden)
    return [(*x[:-1], output), *states]


def made(call: Call) -> Dims:
    """A tensor of one number: its lengths may follow those of the model, which a trial shows."""
    return news(call.shape, None)


def triangle(call: Call) -> Dims:
    """A mask of positions."""
    hold(*call["self"][-2:])
    return call["self"]


def find_rule(target: torch._ops.OpOverload) -> Rule | None:
    """The rule of an operator, by its name without dimensions and the mark of an operator that works in place."""
    name = re.sub(r"([123]d)?_?$", "", target._schema.name.removeprefix("aten::"))
    packet = target.overloadpacket
    tags = [tag for overload in packet.overloads() for tag in getattr(packet, overload).tags]
    return RULES.get(name) or (elementwise if torch.Tag.pointwise in tags else None)


NAMES: dict[Rule, str] = {
    views.view: "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as reshape_as ravel",
    views.permutation: "permute transpose t mT numpy_T movedim moveaxis swapaxes swapdims adjoint",
    views.expand: "expand expand_as broadcast_to",
    views.repeat: "repeat",
    views.repeat_interleave: "repeat_interleave",
    views.pick: "select unbind",
    views.resize: "slice narrow pad constant_pad_nd",
    views.pieces: "split split_with_sizes chunk tensor_split",
    views.glu: "glu",
    views.joint: "cat concat stack",
    views.lookup: "index",
    elementwise: "layer_norm rms_norm",
    same: "dropout alpha_dropout feature_dropout contiguous clone to type_as detach alias _to_copy lift_fresh "
    "lift_fresh_copy float double zeros_like ones_like empty_like full_like rand_like randn_like silu gelu celu "
    "rrelu",
    ordered: "softmax log_softmax _softmax cumsum cumprod logcumsumexp softmin flip roll",
    reduction: "mean sum amax amin max min var std norm linalg_vector_norm logsumexp argmax argmin any all prod",
    linear: "linear",
    convolution: "conv conv_transpose",
    pooling: "max_pool avg_pool adaptive_avg_pool adaptive_max_pool upsample_nearest upsample_linear upsample_bilinear "
    "upsample_bicubic upsample_trilinear",
    channel_norm: "batch_norm instance_norm prelu",
    group_norm: "group_norm",
    embedding: "embedding",
    attention: "scaled_dot_product_attention",
    product: "matmul mm bmm addmm baddbmm mv",
    einsum: "einsum",
    recurrent: "lstm gru rnn_tanh rnn_relu",
    made: "zeros ones full empty new_zeros new_ones new_full new_empty",
    triangle: "tril triu",
}
RULES = {name: rule for rule, names in NAMES.items() for name in names.split()}
