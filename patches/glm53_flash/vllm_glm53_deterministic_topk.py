"""Select index pools by one exact rule, in ascending order.

Symptom: two identical requests above 2,048 tokens give different log-probabilities, and greedy
    text that differs from some token on.
Cause: `sparse_attn_indexer_kpool` takes each row's pools from a top-k kernel. Those kernels list
    the pools in the order in which their threads come, and of the pools that tie at the k-th score
    they take whichever come first; the sparse attention then sums the keys in that order.
Change: the calls go through `glm_topk`, a module of ours that this patch adds: vLLM's kernel runs
    as before, then one pass over the row takes the k best scores, ties by lowest pool id, and lists
    them by ascending id, -1 behind them. From 0.32 on the ids are put in order once more after the
    merge over ranks, which keeps the set but not the order. Sorting the kernel's list alone is
    tempting, but leaves the ties; so does asking the kernel for a few pools more than k.
    Our calls take upstream's own arguments: what a column of the logits means has changed once
    already (0.33 lets every row start at column 0), and a rule that computes columns by itself
    then reads other scores without an error.
Upstream: https://github.com/vllm-project/vllm/pull/57546 gave decode one place to choose its
    kernel; none of its kernels breaks ties.
Drop when: vLLM offers a top-k with a stated order and tie rule on both paths.
Cost: two launches a layer and step for small batches, one for large ones, which read the rows once
    or twice more; figures in docs/deterministic-topk.md. GLM_TOPK_DETERMINISTIC=0 takes the pools
    as vLLM's kernels list them; any value but 0 and 1 stops the start. Rows of up to k pools,
    which every kernel selects whole, only gain their order.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from imagebuild.patching.patch import Answer, Edit, NewFile, Patch, Probe, Symbol, Variant
from imagebuild.patching.structure import (
    Function,
    NotThere,
    calls,
    dotted,
    function,
    only_call,
    parameters,
    resolve,
)
from imagebuild.patching.tree import Tree

_PATH = "vllm/models/glm5next/nvidia/sparse_indexer.py"
_SCOPE = "sparse_attn_indexer_kpool"
_MODULE = "glm_topk.py"
_LOGITS = "vllm/utils/deep_gemm.py"
_TOPK = "vllm/model_executor/layers/indexer_topk.py"
_LAYER = "vllm/model_executor/layers/sparse_attn_indexer.py"
_MERGE_KERNELS = "vllm/model_executor/kernels/attention/dsa/dcp_indexer_cutedsl.py"
_MERGE = "_merge_dcp_topk_global"
_EXPAND = ("expand_pools_and_append_tail", "expand_pools_to_tokens")

# What each function of our module must go through.
_REACHES = {
    "prefill": "_select",
    "decode": "_decode",
    "_decode": "_select",
    "_select": "_select_kernel",
    "ascending": "_sort_kernel",
}

# What is known of a buffer of pool ids, from good to bad.
_RULED = "by the rule"
_UNORDERED = "the right pools, in any order"
_RAW = "as a kernel lists them"
_WORSE = (_RULED, _UNORDERED, _RAW)

# What a call makes of a buffer that it is given, and of which it is known what the second says;
# None when the call means nothing special.
_Meaning = Callable[[str, ast.Call, str], str | None]


def _callee(call: ast.Call) -> str:
    """The name behind a call; of f(x)(y) it is f."""
    called: ast.expr = call
    while isinstance(called, ast.Call):
        called = called.func
    return dotted(called)


def _root(node: ast.expr | None) -> str:
    """The variable that an expression is made from: x of x.to(t).sort().values[0]."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return dotted(node)


class _Walk:
    """Follows the buffers of pool ids through a function, statement by statement.

    Attributes:
        expanded: for each call that expands pools to tokens: its line, and what was known of them.
    """

    def __init__(self, meaning: _Meaning) -> None:
        self.meaning = meaning
        self.expanded: dict[int, str] = {}
        self._same: dict[str, str] = {}

    def block(self, body: list[ast.stmt], known: dict[str, str]) -> dict[str, str]:
        """What is known behind a block, given what is known before it."""
        for statement in body:
            if isinstance(statement, ast.If):
                known = self._branches(statement, known)
            elif isinstance(statement, ast.For | ast.While | ast.With):
                known = self.block(statement.body, known)
            elif isinstance(statement, ast.Assign | ast.Expr | ast.AnnAssign):
                self._expansions(statement, known)
                known = self._step(statement, known)
        return known

    def _branches(self, statement: ast.If, known: dict[str, str]) -> dict[str, str]:
        ends = []
        for body in (statement.body, statement.orelse):
            after = self.block(body, dict(known))
            if not body or not isinstance(body[-1], ast.Return | ast.Continue | ast.Raise):
                ends.append(after)
        joined: dict[str, str] = {}
        for end in ends:
            for name, state in end.items():
                joined[name] = max(state, joined.get(name, _RULED), key=_WORSE.index)
        return joined

    def _expansions(self, statement: ast.stmt, known: dict[str, str]) -> None:
        for name in _EXPAND:
            for call in calls(statement, name):
                ids = self._buffer(_root(call.args[0]) if call.args else "")
                self.expanded[call.lineno] = known.get(ids, _RAW)

    def _buffer(self, name: str) -> str:
        return self._same.get(name, name)

    def _step(self, statement: ast.stmt, known: dict[str, str]) -> dict[str, str]:
        value = getattr(statement, "value", None)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = dotted(statement.targets[0])
            source = self._buffer(_root(value))
            if isinstance(value, ast.Name) and source in known:
                self._same[target] = source
            elif isinstance(value, ast.Call | ast.Attribute) and target:
                state = known.get(source, _RAW)
                for call in (node for node in ast.walk(value) if isinstance(node, ast.Call)):
                    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
                    state = self.meaning(name, call, state) or state
                known = {**known, target: state}
        elif isinstance(statement, ast.Expr) and isinstance(value, ast.Call):
            method = value.func if isinstance(value.func, ast.Attribute) else None
            given = [_root(argument) for argument in value.args if isinstance(argument, ast.Name)]
            given += [dotted(method.value)] if method else []
            for name in (self._buffer(name) for name in given):
                if name in known:
                    after = self.meaning(_callee(value), value, known[name])
                    known = {**known, name: _RAW if after is None else after}
        return known


def _of_merge_and_fill(name: str, call: ast.Call, state: str) -> str | None:
    if name == _MERGE and state != _RAW:
        return _UNORDERED
    if name.endswith(".fill_") and [ast.unparse(item) for item in call.args] == ["-1"]:
        return _RULED
    return None


def _ours(name: str, call: ast.Call, state: str) -> str | None:
    """Calls into our module, whose rule the patch is about."""
    if name in ("glm_topk.prefill", "glm_topk.decode"):
        return _RULED
    if name == "glm_topk.ascending":
        return _RAW if state == _RAW else _RULED
    return _of_merge_and_fill(name, call, state)


def _upstreams(name: str, call: ast.Call, state: str) -> str | None:
    """Calls that say by name or keyword that they settle ties, and sorts of what is settled."""
    words = [name.rpartition(".")[2]]
    for part in (node for node in ast.walk(call.func) if isinstance(node, ast.Call)):
        words += [word.arg or "" for word in part.keywords if ast.unparse(word.value) == "True"]
    words += [word.arg or "" for word in call.keywords if ast.unparse(word.value) == "True"]
    if any(sign in word for word in words for sign in ("stable_top", "deterministic")):
        return _RULED
    if words[0] == "sort" and state != _RAW:
        return _RULED
    return _of_merge_and_fill(name, call, state)


def _expanded(tree: Tree, meaning: _Meaning) -> dict[int, str]:
    walk = _Walk(meaning)
    walk.block(function(tree, _PATH, _SCOPE).body, {})
    if len(walk.expanded) < 2:
        raise NotThere(f"{_PATH}: expected the expansions of prefill and decode")
    return walk.expanded


def _left_to_kernel(tree: Tree) -> Answer:
    found = _expanded(tree, _upstreams)
    return Answer.of(_RAW in found.values(), f"what is expanded, by line: {found}")


def _settled_by_upstream(tree: Tree) -> Answer:
    found = _expanded(tree, _upstreams)
    return Answer.of(set(found.values()) == {_RULED}, f"what is expanded, by line: {found}")


def _columns(tree: Tree, scope: Function) -> Iterator[str]:
    """Where the bounds that our prefill call gets do not fit the logits that it gets."""
    bounds = only_call(scope, "glm_topk.prefill").args[1:3]
    made = only_call(scope, "fp8_fp4_mqa_logits")
    first, last = (ast.unparse(item) for item in made.args[3:5])
    starts, ends = (ast.unparse(resolve(scope, item)) for item in bounds)
    if "max_seqlen_k" in parameters(function(tree, _LOGITS, "fp8_fp4_mqa_logits")):
        # Compressed: every row starts at column 0.
        if not starts.startswith(("torch.zeros(", "torch.zeros_like(")):
            yield f"rows start at column 0, prefill is told {starts}"
        if ends != f"{last} - {first}":
            yield f"rows end at {last} - {first}, prefill is told {ends}"
    elif [ast.unparse(item) for item in bounds] != [first, last]:
        yield f"rows span [{first}, {last}), prefill is told [{starts}, {ends})"


def _module(tree: Tree) -> Iterator[str]:
    """What a file of our module's name lacks to be it."""
    for name, inner in _REACHES.items():
        nodes = ast.walk(function(tree, _MODULE, name))
        if inner not in {node.id for node in nodes if isinstance(node, ast.Name)}:
            yield f"{name} of {_MODULE} does not use {inner}"


def _ruled(tree: Tree) -> Answer:
    scope = function(tree, _PATH, _SCOPE)
    found = _expanded(tree, _ours)
    faults = [f"line {line}: {state}" for line, state in found.items() if state != _RULED]
    if not tree.exists(_MODULE):
        return Answer.of(False, f"the tree has no {_MODULE}")
    if not faults:
        faults += [*_columns(tree, scope), *_module(tree)]
        sizes = {ast.unparse(call.args[4]) for call in calls(scope, _MERGE)}
        asked = {ast.unparse(call.args[1]) for call in calls(scope, "glm_topk.ascending")}
        faults += [] if sizes == asked else [f"merged over {sizes}, ordered for {asked}"]
    return Answer.of(not faults, f"expansions by line: {found}; faults: {faults or 'none'}")


_IMPORT = Edit(
    label="import",
    path=_PATH,
    kind="insert_before",
    anchor="import vllm.envs as envs\n",
    text="import glm_topk  # patch: vllm_glm53_deterministic_topk\n",
)
_PREFILL = Edit(
    label="prefill",
    path=_PATH,
    scope=_SCOPE,
    anchor="torch.ops._C.top_k_per_row_prefill(\n",
    text="glm_topk.prefill(  # patch: vllm_glm53_deterministic_topk\n",
)
_DECODE = Edit(
    label="decode",
    path=_PATH,
    scope=_SCOPE,
    anchor="        get_indexer_topk(topk_backend)(\n",
    text=(
        "        # patch: vllm_glm53_deterministic_topk\n"
        "        glm_topk.decode(get_indexer_topk(topk_backend))(\n"
    ),
)
_ORDERED = (
    "{0}# patch: vllm_glm53_deterministic_topk\n{0}glm_topk.ascending(topk_dst, dcp_world_size)\n\n"
)
_MERGED_PREFILL = Edit(
    label="order after prefill's merge",
    path=_PATH,
    scope=_SCOPE,
    kind="insert_before",
    anchor=(
        "            if index_kpool > 1:\n"
        "                pool_ids = pool_topk.to(torch.int64)\n"
        "                if positions is not None:\n"
    ),
    text=_ORDERED.format(" " * 12),
)
_MERGED_DECODE = Edit(
    label="order after decode's merge",
    path=_PATH,
    scope=_SCOPE,
    kind="insert_before",
    anchor="        # Resolve to token-level indices in the output buffer.\n",
    text=_ORDERED.format(" " * 8),
)
_FILES = (NewFile(source=_MODULE, path=_MODULE),)
_SHARED = (
    # The layout of the logits stands in its docstring; the binary has no other text on it.
    Symbol(_LOGITS, "fp8_fp4_mqa_logits"),
    Symbol(_TOPK, "get_indexer_topk"),
    Symbol(_TOPK, "SparseIndexerTopk.forward"),
    Symbol(_PATH, "SparseAttnIndexerKpool.forward_cuda"),
)

PATCH = Patch(
    name="vllm_glm53_deterministic_topk",
    status="pending",
    upstream="https://github.com/vllm-project/vllm/pull/57546",
    origin="fault found by the GX10 recipe; rule, kernels and text are ours",
    variants=(
        Variant(
            versions=">=0.31,<0.32",
            edits=(_IMPORT, _PREFILL, _DECODE),
            files=_FILES,
            relies_on=_SHARED,
        ),
        Variant(
            versions=">=0.32,<0.34",
            edits=(_IMPORT, _PREFILL, _DECODE, _MERGED_PREFILL, _MERGED_DECODE),
            files=_FILES,
            relies_on=(
                *_SHARED,
                # Its rule for ties must stay ours: by score, then by lowest id.
                Symbol(_LAYER, _MERGE),
                Symbol(_MERGE_KERNELS, "PackDCPTopkCandidatesKernel.kernel"),
                Symbol(_MERGE_KERNELS, "StableTopKFromGatheredCandidatesKernel"),
            ),
        ),
    ),
    reason=Probe(
        claim="the order of a row's pools, and which tied ones win, are left to the top-k kernel",
        check=_left_to_kernel,
        paths=(_PATH,),
    ),
    effect=Probe(
        claim="prefill and decode expand pools that the rule has chosen and ordered, after the "
        "merge over ranks where there is one, with bounds that fit the logits",
        check=_ruled,
        paths=(_PATH, _MODULE, _LOGITS),
    ),
    absorbed=Probe(
        claim="vLLM asks for a stable top-k on both paths, and orders what a merge gives",
        check=_settled_by_upstream,
        paths=(_PATH,),
    ),
    needs=("vllm_indexer_topk_init",),
    knob="GLM_TOPK_DETERMINISTIC",
)
