"""Sansho through the whole engine: whatever way a prompt takes, its answer is the plain reference's, in float32."""

import json
import shutil

import pytest
import torch
from checkpoints import hf_full_logprobs, load_script
from engine_helpers import (
    TOLERANCE,
    SequenceLog,
    check_generate,
    check_idle,
    check_output,
    generate,
    greedy,
    make_prompts,
    oracle_tokens,
)
from safetensors.torch import load_file, save_file
from test_scoring import check_scores

from nanovllm import LLM, SamplingParams
from nanovllm.engine import sansho_batch
from nanovllm.engine.batch import upload
from nanovllm.engine.results import PLAIN, draw_tokens
from nanovllm.models.sansho_config import SANSHO_500M, SanshoConfig

B = 4
MAMBA, CROSS = "cross_mamba", "cross_attention"


def layers(*cross, num_self=2):
    """Fields for these cross layers behind `num_self` self layers."""
    return {
        "num_hidden_layers": num_self + len(cross),
        "num_self_decoder_layers": num_self,
        "layer_types": ["sliding_attention"] * num_self + list(cross),
    }


VARIANTS = {
    "one loop, untied, no q/k norm, no conv bias": {
        **layers(CROSS, MAMBA, CROSS, num_self=3),
        "universal_loop": 1,
        "tie_word_embeddings": False,
        "qk_norm": False,
        "mamba_conv_bias": False,
        "sliding_window": 5,
    },
    "three loops, one group, one self layer": {
        **layers(MAMBA, MAMBA, CROSS, num_self=1),
        "universal_loop": 3,
        "mamba_n_groups": 1,
        "mamba_d_conv": 2,
        "mamba_chunk_size": 1,
        "sliding_window": 13,
    },
    "states alone, window of one": {**layers(MAMBA, MAMBA), "sliding_window": 1, "mamba_n_groups": 4},
    "two loops of one layer, attention last": {**layers(MAMBA, CROSS, num_self=1), "sliding_window": 4},
    "no convolution": {**layers(MAMBA, CROSS), "mamba_d_conv": 1, "sliding_window": 9},
}


@pytest.fixture(scope="module")
def export_of(tmp_path_factory):
    """An export by the name of its variant, made once."""
    made = {}

    def get(name):
        if name not in made:
            directory = tmp_path_factory.mktemp("export")
            make_export = load_script("make_sansho_export").make_export
            made[name] = make_export(directory, seed=len(made) + 1, tokenizer=False, **VARIANTS[name])
        return made[name]

    return get


# Shapes


@pytest.mark.parametrize("variant", VARIANTS)
def test_any_shape_in_any_order(make_llm, export_of, variant):
    """Batches, chunks that cut windows and convolutions, and prefixes from snapshots."""
    path = export_of(variant)
    llm = make_llm(path, max_num_batched_tokens=7, skip_tokenizer_init=True)
    prompts = make_prompts(18, 1, 3, 25)
    cached = []
    for _ in range(2):
        cached.append([output["num_cached_tokens"] for output in check_generate(llm, path, prompts, max_tokens=12)])
    assert cached == [[0, 0, 0, 0], [16, 0, 0, 24]]
    check_scores(llm, path, make_prompts(21, 4, seed=2), num_top=2)


def test_the_500m_shape_has_its_parameters():
    """351,625,408 of them, in an export's tensors and in the serving model's."""
    script = load_script("make_sansho_export")
    shapes = script.tensor_shapes(SANSHO_500M)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 351_625_408
    config = SanshoConfig.from_dict(SANSHO_500M)
    with torch.device("meta"):
        model = mamba_model(config)
    spare = 7 * 768  # rows that make those of the vocabulary a multiple of eight
    assert sum(parameter.numel() for parameter in model.parameters()) == 351_625_408 + spare


def mamba_model(config):
    """The serving model of a config."""
    from nanovllm.models.sansho import SanshoForCausalLM

    return SanshoForCausalLM(config, 64, torch.bfloat16)


def test_the_500m_shape_has_its_caches():
    """11.8 MB of windows, 0.16 MB of conv inputs, 12.6 MB of states a sequence; 768 bytes of shared KV a token."""
    with torch.device("meta"):
        *windows, shared, conv, ssm = mamba_model(SanshoConfig.from_dict(SANSHO_500M)).cache_specs(2)
    assert len(windows) == 60
    assert sum(spec.bytes_per_row(64) for spec in windows) == 60 * 2 * 256 * 3 * 64 * 2
    assert conv.bytes_per_row(64) == 16 * 3 * 1664 * 2
    assert ssm.bytes_per_row(64) == 16 * 24 * 64 * 128 * 4
    assert shared.bytes_per_block(64) == 768 * 64
    assert [spec.resumes_anywhere for spec in (windows[0], shared, conv, ssm)] == [False, True, False, False]


# Chunks and windows


@pytest.mark.parametrize("budget", range(1, 20))
def test_a_prompt_cut_at_every_place(make_llm, sansho_path, budget):
    """19 tokens, more than two windows, beside a shorter prompt that starts within a cut step."""
    llm = make_llm(sansho_path, max_num_batched_tokens=budget)
    check_generate(llm, sansho_path, make_prompts(19, 6), max_tokens=6)


@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
def test_other_block_sizes(make_llm, sansho_path, block_size):
    """Rings of eight pages of one token, of three pages that the window does not fill, of one page."""
    llm = make_llm(sansho_path, kvcache_block_size=block_size, num_kvcache_blocks=-(-256 // block_size))
    prompts = make_prompts(1, 16, 33)
    for _ in range(2):
        check_generate(llm, sansho_path, prompts, max_tokens=20)


@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 9, 15, 16, 17])
def test_every_place_around_the_window(make_llm, sansho_path, length):
    """Prompts that end before, at and after the window's and a block's edge, with answers of two windows."""
    check_generate(make_llm(sansho_path), sansho_path, make_prompts(length), max_tokens=17)


def test_long_prompts_are_absorbed_in_pieces(make_llm, sansho_path, monkeypatch):
    """Pieces of 5 tokens that cut sequences, snapshots and chunks of the scan."""
    monkeypatch.setattr(sansho_batch, "_PIECE_TOKENS", 5)
    llm = make_llm(sansho_path, max_num_batched_tokens=40)
    prompts = make_prompts(17, 9, 5, 33, 8)
    for _ in range(2):
        check_generate(llm, sansho_path, prompts, max_tokens=6)


def test_leaving_the_cross_decoder_early_changes_nothing(make_llm, sansho_path):
    """The same prompts with and without their own log probabilities, which need every row."""
    prompts = make_prompts(18, 5, 11)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    early = generate(make_llm(sansho_path), prompts, params)
    llm = make_llm(sansho_path)
    seqs = [llm.engine.add(prompt, params, prompt_logprobs=2)[0] for prompt in prompts]
    while llm.engine.has_unfinished:
        llm.engine.step()
    for prompt, output, seq in zip(prompts, early, seqs, strict=True):
        assert output["token_ids"] == seq.output_token_ids
        torch.testing.assert_close(torch.tensor(output["logprobs"]), torch.tensor(seq.logprobs), rtol=0, atol=1e-5)
        expected = hf_full_logprobs(sansho_path, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = torch.tensor(seq.prompt_token_logprobs)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_only_wanted_rows_meet_the_cross_decoder(make_llm, sansho_path, monkeypatch):
    """One row of each prompt, none of a chunk that does not end it."""
    llm = make_llm(sansho_path, max_num_batched_tokens=16)
    model, rows = llm.engine.runner.model.model, []
    cross = model._cross
    monkeypatch.setattr(model, "_cross", lambda x, *rest: rows.append(len(x)) or cross(x, *rest))
    check_generate(llm, sansho_path, make_prompts(24, 3, 2), max_tokens=1)
    assert rows == [0, 3]


class PaddedPrefills:
    """In the place of CUDA graphs: prefills packed into buckets with room to spare and run at once, decode eager."""

    def __init__(self, runner):
        self.runner, self.num_taken, self.num_refused = runner, 0, 0
        runner.graphs, runner._replay_most = self, 0
        runner._logits = torch.empty(runner.rows.padding_row, runner.model.config.vocab_size)

    def prefill(self, chunks, num_tokens):
        runner, size = self.runner, num_tokens + 5
        packed = runner._pack_short(chunks, size)
        if packed is None:
            self.num_refused += 1
            return None
        self.num_taken += 1
        room, plan = runner._short_room(size), runner._plan(chunks)
        seq_lens = [chunk.start + len(chunk.token_ids) for chunk in chunks] + [0] * (room.seqs - len(chunks))
        found = runner._prefill_hidden(torch.from_numpy(packed), room, [size], seq_lens, segments=plan.segments)
        logits = runner.model.compute_logits(found[1], runner._logits[: room.seqs])
        return *found, draw_tokens(runner.rows, logits, found[0], PLAIN)[0]


@pytest.mark.parametrize("budget", [5, 16, 40])
def test_prefills_in_buckets(make_llm, sansho_path, monkeypatch, budget):
    """What the graph of a prefill computes: padding among tokens, sequences, spans and slots changes nothing, be it in
    batches, in chunks, with snapshots or for requests that need more than a plain draw; scored prompts go without."""
    monkeypatch.setattr(sansho_batch, "_PIECE_TOKENS", 6)
    llm = make_llm(sansho_path, max_num_batched_tokens=budget, max_num_seqs=5)
    poison(llm.engine.runner)
    graphs = PaddedPrefills(llm.engine.runner)
    prompts = make_prompts(17, 9, 1, 33, 8)
    for _ in range(2):
        check_generate(llm, sansho_path, prompts, max_tokens=6)
    assert graphs.num_taken >= 3 and not graphs.num_refused
    outputs = generate(llm, make_prompts(7, 9, seed=4), [greedy(3, logprobs=3), SamplingParams(temperature=1, top_k=1)])
    assert all(output["token_ids"] for output in outputs)
    check_scores(llm, sansho_path, make_prompts(21, 4, seed=2), num_top=2)
    assert graphs.prefill([], 0) is not None, "a graph is captured over padding alone"
    check_idle(llm)


# Rows


def poison(runner):
    """Fill all that a sequence may own with NaN; what padding reads stays."""
    caches, padding = runner.caches, runner.rows.padding_row
    for tensor in (*caches.shared, *runner._rings):
        kept = tensor[runner.num_blocks].clone() if tensor is caches.shared.k or tensor is caches.shared.v else None
        tensor.fill_(torch.nan)
        if kept is not None:
            tensor[runner.num_blocks] = kept
    for tensor in caches.state:
        kept = tensor[padding].clone()
        tensor.fill_(torch.nan)
        tensor[padding] = kept


def test_a_row_holds_nothing_of_whoever_had_it(make_llm, sansho_path):
    """Everything is NaN before a sequence starts; two rows serve eight sequences that end at different times."""
    llm = make_llm(sansho_path, max_num_seqs=2)
    poison(llm.engine.runner)
    prompts = make_prompts(5, 1, 9, 16, 3, 12, 2, 30)
    lengths = [1 + 3 * i % 8 for i in range(8)]
    for _ in range(2):
        outputs = generate(llm, prompts, [greedy(n) for n in lengths])
        for prompt, output, n in zip(prompts, outputs, lengths, strict=True):
            check_output(sansho_path, prompt, output, n)


def test_padding_touches_no_row(make_llm, sansho_path):
    """A decode step of two rows, alone and in a batch filled up to five: equal logits, equal caches of all rows, and
    the block that padding reads is still zero."""
    llm = make_llm(sansho_path)
    engine, runner = llm.engine, llm.engine.runner
    seqs = [engine.add(prompt, greedy(9))[0] for prompt in make_prompts(11, 6)]
    while not all(seq.num_output_tokens for seq in seqs):
        engine.step()
    live = [seq.row for seq in seqs]
    tensors = (*runner.caches.shared, *runner._rings, *runner.caches.state, runner.rows.context_len)
    before = [tensor.clone() for tensor in tensors]
    found = []
    for rows in (live, [live[0], runner.rows.padding_row, live[1], *[runner.rows.padding_row] * 2]):
        for tensor, saved in zip(tensors, before, strict=True):
            tensor.copy_(saved)
        with torch.inference_mode():
            logits = runner._decode_logits(upload(rows, torch.int64, runner.device), [20] * len(rows))
        own = [rows.index(row) for row in live]
        k, v, *rings, conv, ssm, lens = (tensor.clone() for tensor in tensors)
        pages = [
            index for row in live for index in range(row * runner.ring.num_blocks, (row + 1) * runner.ring.num_blocks)
        ]
        found.append([logits[own], k, v, *(ring[:, pages] for ring in rings), conv[live], ssm[live], lens[live]])
        assert not k[runner.num_blocks].any() and not v[runner.num_blocks].any()
        assert logits.isfinite().all()
    for alone, padded in zip(*found, strict=True):
        torch.testing.assert_close(alone, padded, rtol=0, atol=3e-5, equal_nan=True)
    engine.recover()


@pytest.mark.parametrize("num_blocks", [12, 16])
def test_preempted_answers_are_those_of_the_undisturbed(make_llm, sansho_path, num_blocks):
    """A pool of a few blocks: rows are given up and start anew, from a snapshot where one is left."""
    llm = make_llm(sansho_path, num_kvcache_blocks=num_blocks, sansho_prefix_checkpoints=3)
    poison(llm.engine.runner)
    seqs = SequenceLog(llm)
    check_generate(llm, sansho_path, make_prompts(12, 3, 7, 16, 5, 9, 1, 10), max_tokens=20)
    assert seqs.num_preemptions >= 4


def test_a_thousand_short_requests_through_three_rows(make_llm, sansho_path):
    llm = make_llm(sansho_path, max_num_seqs=3, sansho_prefix_checkpoints=5)
    prompts = [[i % 7, 3, i % 5, i % 11, 9, 9][: 1 + i % 6] for i in range(1000)]
    outputs = generate(llm, prompts, [greedy(1 + i % 2, logprobs=None) for i in range(1000)])
    check_idle(llm)
    for i in range(0, 1000, 37):
        assert outputs[i]["token_ids"] == oracle_tokens(sansho_path, prompts[i], 1 + i % 2)


def test_everything_that_a_request_may_ask(make_llm, sansho_path):
    """n > 1 is n seeds, penalties and filters see the same logits in any batch, a stop string ends a text."""
    prompt, *others = make_prompts(9, 4, 14)
    params = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, "presence_penalty": 0.5, "top_k": 50}
    (together,) = generate(make_llm(sansho_path), [prompt], SamplingParams(n=3, seed=7, **params))
    llm = make_llm(sansho_path, max_num_batched_tokens=8)
    alone = [generate(llm, [*others, prompt], SamplingParams(seed=seed, **params))[2] for seed in (7, 8, 9)]
    assert [sample["token_ids"] for sample in together["outputs"]] == [output["token_ids"] for output in alone]
    (text,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=12))
    stop = text["text"][3:6]
    (stopped,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=12, stop=[stop]))
    assert stopped["text"] == text["text"].split(stop)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)


# Snapshots


def test_a_prefix_is_resumed_where_a_snapshot_is(make_llm, sansho_path):
    """Prompts that part after 9 tokens: the second one meets known blocks without a snapshot at 8 and leaves one there,
    which the third resumes."""
    llm = make_llm(sansho_path)
    (prefix,) = make_prompts(9)
    prompts = [[*prefix, *tail] for tail in ([1] * 8, [2] * 9, [3] * 3)]
    cached = [check_generate(llm, sansho_path, [prompt], max_tokens=5)[0]["num_cached_tokens"] for prompt in prompts]
    assert cached == [0, 0, 8]
    again = check_generate(llm, sansho_path, prompts, max_tokens=5)
    assert [output["num_cached_tokens"] for output in again] == [16, 16, 8]


def test_a_conversation_goes_on_from_its_last_turn(make_llm, sansho_path):
    """Blocks that decode steps filled have no snapshot; the prompt's end has, and the next turn leaves its own."""
    llm = make_llm(sansho_path)
    (turn,) = make_prompts(10)
    cached = []
    for _ in range(3):
        (output,) = check_generate(llm, sansho_path, [turn], max_tokens=11)
        cached.append(output["num_cached_tokens"])
        turn = turn + output["token_ids"] + [3, 4]
    assert cached == [0, 8, 20]


@pytest.mark.parametrize(("slots", "cached"), [(0, [0, 0, 0]), (1, [12, 0, 0]), (3, [12, 16, 8])])
def test_the_pool_of_snapshots_is_bounded(make_llm, sansho_path, slots, cached):
    """The least recently used one goes first; three prompts leave three. With one slot the second call resumes from it
    and takes it for another prompt in one step."""
    llm = make_llm(sansho_path, sansho_prefix_checkpoints=slots)
    prompts = make_prompts(9, 17, 14)
    check_generate(llm, sansho_path, prompts)
    poison_rows(llm.engine.runner)
    outputs = check_generate(llm, sansho_path, prompts[::-1])
    assert [output["num_cached_tokens"] for output in outputs] == cached


def poison_rows(runner):
    """NaN in everybody's row, snapshots apart."""
    rows, pages = runner.rows.padding_row, runner.ring.num_blocks
    for tensor in runner.caches.state:
        tensor[:rows] = torch.nan
    for tensor in runner._rings:
        tensor[:, : rows * pages] = torch.nan


def test_equal_prompts_in_one_call_share_a_snapshot(make_llm, sansho_path):
    outputs = check_generate(make_llm(sansho_path), sansho_path, make_prompts(2 * B + 1) * 3)
    assert [output["num_cached_tokens"] for output in outputs] == [0, 2 * B, 2 * B]


# Knobs


def test_shapes_are_touched_at_the_start(make_llm, sansho_path, monkeypatch):
    """Every length with every batch size, but for what does not fit; nothing of it is left."""
    from nanovllm.engine import sansho_runner

    seen = []
    run = sansho_runner.SanshoModelRunner.run

    def record(self, step):
        seen.append([len(chunk.token_ids) for chunk in step.chunks] or len(step.decode_rows))
        return run(self, step)

    monkeypatch.setattr(sansho_runner.SanshoModelRunner, "run", record)
    llm = make_llm(
        sansho_path,
        sansho_warmup_prompt_lens=[3, 20],
        sansho_warmup_batch_sizes=[1, 2, 4, 9],
        sansho_warmup_decode_tokens=2,
    )
    expected = []
    for length, size in ((3, 1), (3, 2), (3, 4), (20, 1), (20, 2)):  # 80 tokens and 9 rows are too many
        expected += [[length] * size, size, size]
    assert seen == expected
    check_generate(llm, sansho_path, make_prompts(9, 3))


def test_memory_decides_on_rows_and_snapshots(sansho_path):
    """Half of the budget for rows at most, a quarter for snapshots; a knob is obeyed."""
    with LLM(sansho_path, device="cpu", dtype="float32", max_num_seqs=16, num_kvcache_blocks=64) as llm:
        runner, config = llm.engine.runner, llm.engine.config
        size = runner.bytes_per_row
        assert runner.num_snapshots == 32
        assert runner.reserve(1000 * size, config) == (16 + 1 + 32) * size
        assert runner.reserve(20 * size, config) == (9 + 1 + 5) * size
        assert runner.rows.padding_row == 9
        with pytest.raises(ValueError, match="no memory for the state of one sequence"):
            runner.reserve(3 * size, config)


def test_knobs_of_the_family_are_refused_elsewhere(qwen3_path):
    with pytest.raises(ValueError, match=r"sansho_prefix_checkpoints=3 is not allowed: Qwen3ForCausalLM"):
        LLM(qwen3_path, device="cpu", sansho_prefix_checkpoints=3)


@pytest.mark.parametrize("value", [[0], [4, 1.5], ("8",)])
@pytest.mark.parametrize("knob", ["sansho_warmup_prompt_lens", "sansho_warmup_batch_sizes"])
def test_shapes_to_touch_are_positive(sansho_path, knob, value):
    with pytest.raises(ValueError, match=rf"{knob}={value[-1]!r} is not allowed: an integer of at least 1"):
        LLM(sansho_path, device="cpu", **{knob: value})


# Bad exports


@pytest.fixture
def bad_export(sansho_path, tmp_path):
    """bad_export(config fields, tensors): a copy with these changed; None takes one out."""

    def make(fields=(), tensors=()):
        shutil.copytree(sansho_path, tmp_path / "export")
        file = tmp_path / "export" / "config.json"
        config = json.loads(file.read_text()) | dict(fields)
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        weights = load_file(tmp_path / "export" / "model.safetensors") | dict(tensors)
        kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
        save_file(kept, tmp_path / "export" / "model.safetensors")
        return str(tmp_path / "export")

    return make


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cross_mamba_type": "memory_hyena"}, "cross_mamba_type='memory_hyena' is not supported: only 'memory_ssm'"),
        ({"cross_mamba_type": None}, "'cross_mamba_type'"),
        (layers("cross_lstm", MAMBA, CROSS, MAMBA), r"layer_types\[2\]='cross_lstm'"),
        ({"layer_types": ["full_attention"] * 6}, r"layer_types\[0\]='full_attention'"),
        (layers(CROSS, CROSS), "layer_types has no 'cross_mamba'"),
        ({"num_hidden_layers": 7}, "layer_types has 6 entries, num_hidden_layers is 7"),
        ({"universal_loop": 0}, "universal_loop=0"),
        ({"sliding_window": None}, "'sliding_window'"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype='bfloat16'"),
        ({"mamba_d_head": 7}, "mamba_d_ssm=48 is not a multiple of mamba_d_head=7"),
        ({"mamba_n_groups": 3}, "mamba_heads=4 is not a multiple of mamba_n_groups=3"),
        ({"cross_num_key_value_heads": 4}, "not a multiple of cross_num_key_value_heads=4"),
        ({"qk_norm": 1}, "qk_norm=1"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"quantization_config": {"quant_method": "x"}}, "quant_method='x'"),
    ],
)
def test_a_config_that_is_not_defined_is_refused_by_name(bad_export, fields, message):
    with pytest.raises(ValueError, match=message):
        LLM(bad_export(fields), device="cpu")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.4.cross_mamba.A_log": None}, r"missing model.layers.4.cross_mamba.A_log; unexpected none"),
        ({"model.yoco_v_proj.weight": None}, r"missing model.yoco_v_proj.weight"),
        ({"model.layers.2.cross_mamba.memory_proj.weight": None}, r"missing model.layers.2.cross_mamba.memory_proj"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}, r"unexpected model.layers.0.self_attn.q_proj.bias"),
        ({"lm_head.weight": torch.zeros(512, 64)}, "unexpected lm_head.weight"),
        ({"model.layers.5.cross_mamba.conv1d.weight": torch.zeros(68, 4)}, r"conv1d.weight' has shape \(68, 4\)"),
        ({"model.layers.3.cross_attn.q_norm.weight": torch.zeros(17)}, r"cross_attn.q_norm.weight' has shape \(17,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(bad_export, tensors, message):
    with pytest.raises(ValueError, match=message):
        LLM(bad_export(tensors=tensors), device="cpu")


def test_a_16_bit_export_keeps_its_decay_in_float32(make_llm, sansho_path, bad_export):
    """A_log, D and dt_bias stay as they are stored, whatever the model's dtype."""
    path = bad_export({"dtype": "bfloat16"})
    llm = make_llm(path, dtype="bfloat16")
    ssm = llm.engine.runner.model.model.memory_ssm
    stored = load_file(f"{path}/model.safetensors")
    for name in ("A_log", "D", "dt_bias"):
        kept = torch.stack([stored[f"model.layers.{i}.cross_mamba.{name}"] for i in (2, 4, 5)])
        assert torch.equal(getattr(ssm, name), kept)
    assert llm.engine.runner.model.lm_head is None
    assert llm.engine.runner.caches.state.ssm.dtype == torch.float32
    output = generate(llm, make_prompts(12), greedy(6))[0]
    first = hf_full_logprobs(sansho_path, make_prompts(12)[0])[-1]
    assert abs(output["logprobs"][0] - float(first[output["token_ids"][0]])) < 0.5


def test_the_benchmark_of_prefills_runs(monkeypatch, capsys):
    """All figures on tiny sizes, the second prompt of two equal ones resumed; the last line is JSON."""
    argv = ["--shape", "tiny", "--device", "cpu", "--lengths", "2x20", "1x30", "--ttft-tokens", "60"]
    monkeypatch.setattr("sys.argv", ["bench_sansho_prefill.py", *argv])
    load_script("bench_sansho_prefill").main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ttft_cold_ms"] > 0 < result["ttft_hit_ms"] and result["cached_tokens"] >= 32
    for case in ("2x20", "1x30"):
        assert all(value > 0 for value in result[case].values()) and len(result[case]) == 5
