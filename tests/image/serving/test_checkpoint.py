"""What a checkpoint leads to: the MoE backend, what fits, and which folder is no checkpoint."""

from __future__ import annotations

import copy
import json

import pytest
from serving import checkpoint as ck
from serving.errors import CheckError
from serving.profiles import GIB
from serving.resolve import resolve

from tests.image.serving.machines import CONFIG, EXPERTS, checkpoint

WEIGHT_ONLY = CONFIG | {
    "quantization_config": {
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"input_activations": None, "weights": {}}},
    }
}
FULL = 182 * GIB


def plan(deployment="rtx6000-4x", **knobs):
    return resolve({"GLM_DEPLOYMENT": deployment} | knobs)


def backend(folder, memory=96 * GIB, deployment="rtx6000-4x", **knobs):
    return ck.moe_backend(plan(deployment, **knobs), ck.read(folder), memory)


def test_what_is_read(tmp_path):
    found = ck.read(checkpoint(tmp_path, size=1 << 20))
    assert (found.experts, found.scaled, found.is_weight_only) == (6, 6, False)
    assert found.weights == 6 * 32 + 6 * 4 + (1 << 20)


def test_calibrated_scales_run_on_cutlass(tmp_path):
    assert backend(checkpoint(tmp_path, size=FULL)) == "flashinfer_cutlass"
    assert backend(tmp_path, GLM_MOE_BACKEND="b12x") == "b12x"


def test_weight_only_runs_on_marlin_where_it_fits(tmp_path):
    checkpoint(tmp_path, config=WEIGHT_ONLY, scales=(), size=FULL)
    assert backend(tmp_path) == "marlin"
    assert backend(tmp_path, int(121.69 * GIB), "gb10-4x") == "marlin"
    with pytest.raises(CheckError) as caught:
        backend(tmp_path, int(121.69 * GIB), "gb10-2x")
    arithmetic, advice = caught.value.problems
    # 91 of weights, 19 of repacking, 8 of cache and 6 of runtime, of 0.92 * 121.69.
    assert "needs 124.0 GiB" in arithmetic
    assert "19.0 (repacking by marlin)" in arithmetic
    assert "there are 112.0" in arithmetic
    assert "humming" in advice
    assert backend(tmp_path, int(121.69 * GIB), "gb10-2x", GLM_MOE_BACKEND="humming") == "humming"


@pytest.mark.parametrize("asked", ["flashinfer_cutlass"])
def test_weight_only_refuses_what_needs_scales(tmp_path, asked):
    checkpoint(tmp_path, config=WEIGHT_ONLY, scales=())
    with pytest.raises(CheckError, match="needs calibrated input scales"):
        backend(tmp_path, GLM_MOE_BACKEND=asked)


@pytest.mark.parametrize(("scales", "missing"), [((), 6), (EXPERTS[:2], 4)])
def test_missing_scales_are_refused_unless_filled_in(tmp_path, scales, missing):
    checkpoint(tmp_path, scales=scales)
    with pytest.raises(CheckError, match=f"{missing} of 6 expert matrices have no input scale"):
        backend(tmp_path)
    assert backend(tmp_path, GLM_MOE_INPUT_SCALE="m=1.6e-3") == "flashinfer_cutlass"


def test_two_of_four_cards_do_not_hold_it(tmp_path):
    checkpoint(tmp_path, size=FULL)
    with pytest.raises(CheckError, match=r"needs 97\.0 GiB a GPU, 91\.0 .*; there are 90\.2"):
        backend(tmp_path, GLM_TP="2")


def edit(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


class TestFolder:
    def problems(self, folder):
        with pytest.raises(CheckError) as caught:
            ck.read(folder)
        return caught.value.problems

    def test_empty(self, tmp_path):
        one, two = self.problems(tmp_path)
        assert "config.json is not there; is GLM_MODEL_DIR mounted?" in one
        assert "index.json is not there" in two

    def test_shard_missing_cut_short_or_no_safetensors(self, tmp_path):
        one, two = sorted(checkpoint(tmp_path).glob("*.safetensors"))
        whole = two.stat().st_size
        two.write_bytes(two.read_bytes()[:-1])
        (sentence,) = self.problems(tmp_path)
        assert f"expected {whole} bytes, found {whole - 1}" in sentence
        one.unlink()
        two.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        gone, pointer = self.problems(tmp_path)
        assert "weights fetch" in gone
        assert "is no safetensors file" in pointer

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
    def test_config_that_is_no_object(self, tmp_path, data):
        checkpoint(tmp_path)
        (tmp_path / "config.json").write_bytes(data)
        (sentence,) = self.problems(tmp_path)
        assert "config.json" in sentence

    @pytest.mark.parametrize(
        "header", [b"{", b"[]", b'{"a": 5}', b'{"a":{"data_offsets":[0,"x"]}}']
    )
    def test_header_that_is_none(self, tmp_path, header):
        path = sorted(checkpoint(tmp_path).glob("*.safetensors"))[0]
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        (sentence,) = self.problems(tmp_path)
        assert path.name in sentence

    def test_index_that_leaves_the_folder(self, tmp_path):
        checkpoint(tmp_path)
        edit(tmp_path, ck.INDEX, lambda index: index["weight_map"].update(x="../secret"))
        (sentence,) = self.problems(tmp_path)
        assert "'../secret' is no file name" in sentence

    def test_one_file_without_an_index(self, tmp_path):
        shard = sorted(checkpoint(tmp_path).glob("*.safetensors"))[1]
        shard.rename(tmp_path / "model.safetensors")
        (tmp_path / ck.INDEX).unlink()
        assert ck.read(tmp_path).weights == 6 * 4 + 4096


class TestConfig:
    def problems(self, folder, change, **knobs):
        config = copy.deepcopy(CONFIG)
        change(config)
        checkpoint(folder, config=config)
        return list(ck.config_problems(plan(**knobs), ck.read(folder)))

    def test_well(self, tmp_path):
        assert self.problems(tmp_path, lambda config: None) == []

    def test_another_model(self, tmp_path):
        (sentence,) = self.problems(tmp_path, lambda c: c.update(architectures=["Llama"]))
        assert "found ['Llama']" in sentence

    def test_longer_than_it_can(self, tmp_path):
        (sentence,) = self.problems(
            tmp_path, lambda c: c["text_config"].update(max_position_embeddings=131072)
        )
        assert "GLM_MAX_MODEL_LEN=262144" in sentence

    def test_stock_route_takes_2048_only(self, tmp_path):
        def change(config):
            config["text_config"]["index_topk"] = 2044

        (sentence,) = self.problems(tmp_path, change, GLM_MLA_ROUTE="stock")
        assert "index_topk is 2044" in sentence
        assert self.problems(tmp_path, change) == []

    def test_heads_that_cannot_be_split(self, tmp_path):
        (sentence,) = self.problems(
            tmp_path, lambda c: c["text_config"].update(num_attention_heads=66)
        )
        assert "66 heads" in sentence
