"""The studies in ablations.yaml expand, and their models have the papers' parameter counts."""

import json
import re
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.shipped import shipped_matrix, shipped_studies

from lit_attn.ablate.plan import expand
from lit_attn.attention.compose import DynamicConfig
from lit_attn.attention.spec import PRESETS
from lit_attn.config.study import read_studies


def parameters(study: str, variant: str) -> int:
    from lit_attn.models import factory

    chosen = next(v for v in shipped_matrix(study).variants if v.name == variant)
    data = chosen.experiment.data
    model = factory.resolve(chosen.experiment.model, chosen.match_to, data)
    return factory.count(factory.build(model, data, device="meta"))


def test_the_default_studies_need_no_download() -> None:
    defaults = [name for name, source in shipped_studies().items() if source.study.default]
    assert defaults == ["recall-product"]
    for name in defaults:
        kinds = {job.cell.experiment.data.kind for job in shipped_matrix(name).jobs}
        assert kinds == {"recall"}


def test_the_study_mechanisms_compares_every_preset() -> None:
    """A preset that the study lacked would be in no table of this repository."""
    compared = {variant.name for variant in shipped_matrix("mechanisms").variants}
    # The maps of dcmha-rank-4 alone are more parameters than the model of the study has. A block of
    # MoBA has all tokens of its images, and a latent is as wide as its four heads.
    assert set(PRESETS) - compared == {"dcmha-rank-4", "mla", "moba"}


def test_the_tuned_study_of_text_compares_every_preset_and_no_cross() -> None:
    study = shipped_matrix("text-mechanisms-tuned")
    compared = {variant.name for variant in study.written}
    # AttentionX has another gamma in the paper's language models.
    assert compared - set(PRESETS) == {"attentionx-half"}
    # The recorded study is older than these presets.
    assert set(PRESETS) - compared == {"mla", "moba"}


def test_the_short_study_of_mechanisms_has_the_published_model_and_rates() -> None:
    """Only AutoAugment, the passes of an epoch, the length and the precision differ."""
    short = shipped_matrix("cifar100-mechanisms").variants[0].experiment
    published = shipped_matrix("belief2-cifar100").variants[0].experiment
    for part in ("model", "loss", "optimizer"):
        assert getattr(short, part) == getattr(published, part), part
    kept = [step for step in published.data.augment if step.kind != "autoaugment"]
    assert list(short.data.augment) == kept
    assert short.schedule.warmup / short.training.epochs == pytest.approx(
        published.schedule.warmup / published.training.epochs
    )
    assert (short.data.batch_size, short.data.validation) == (published.data.batch_size, 2000)


TABLE_2 = ("standard", "belief-star", "belief2")
"""Variants of Belief2's Table 2 in the order of its columns."""


def test_the_study_of_table_2_differs_from_the_published_one_in_its_precision_alone() -> None:
    published = shipped_matrix("belief2-cifar100")
    tf32 = shipped_matrix("belief2-table2-tf32")
    assert tuple(variant.name for variant in tf32.variants) == TABLE_2
    assert tf32.seeds == published.seeds == (0, 50, 100)
    assert tf32.published == {name: published.published[name] for name in TABLE_2}
    originals = {variant.name: variant for variant in published.variants}
    for variant in tf32.variants:
        original = originals[variant.name]
        assert variant.match_to == original.match_to
        training = original.experiment.training.model_copy(update={"precision": "tf32"})
        changed = original.experiment.model_copy(update={"training": training})
        assert variant.experiment.identity() == changed.identity()
        # 50,000 images in batches of 128, three times in each of 100 epochs.
        assert training.steps(3 * 50_000 // 128) == 117_100


def test_the_single_seed_in_fp32_is_the_published_cell() -> None:
    published = {(job.variant, job.seed): job for job in shipped_matrix("belief2-cifar100").jobs}
    jobs = shipped_matrix("belief2-table2-fp32").jobs
    assert [job.variant for job in jobs] == list(TABLE_2)
    for job in jobs:
        assert job.identity == published[job.variant, 0].identity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "count"),
    [("recall-product", 44_016), ("product", 22_314), ("digits", 32_714), ("mechanisms", 32_714)],
)
def test_variants_of_the_small_studies_have_equal_parameter_counts(study: str, count: int) -> None:
    """The tables of these studies compare models of equal size, except models without an FFN."""
    for variant in shipped_matrix(study).variants:
        if variant.experiment.model.ffn is None:
            assert parameters(study, variant.name) < count
            continue
        assert parameters(study, variant.name) == pytest.approx(count, rel=0.005), variant.name


def test_the_default_study_has_every_sensible_point_of_the_product() -> None:
    """A token's own value x zz x FFN x composition."""
    matrix = shipped_matrix("recall-product")
    assert len(matrix.variants) == 3 * 2 * 2 * 2
    specs = {variant.experiment.model.attention for variant in matrix.variants}
    assert len(specs) == len(matrix.variants) // 2


def test_the_examples_of_the_documentation_expand(tmp_path: Path) -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in ("studies.md", "fair.md"))
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    counts = {}
    for example in examples:
        path = tmp_path / "ablations.yaml"
        path.write_text(example.replace("experiments/", f"{ROOT}/experiments/"))
        for name, source in read_studies(path).items():
            counts[name] = len(expand(source, tmp_path).jobs)
    # The final cells of a tuned study are known after its trials, and those of a study with a
    # design after its screening.
    sizes = {f"ladder-{size}": 2 * 5 for size in ("small", "medium", "large")}
    product = (16 - 2 - 3 + 1) * 3
    staged = {"tuned": 0, "mechanisms": 0}
    assert counts == {"split": 4 * 3, "product": product} | staged | sizes


@pytest.mark.parametrize("name", [name for name in shipped_studies() if name.endswith("-short")])
def test_a_short_study_has_a_tenth_of_the_schedule(name: str) -> None:
    long = shipped_matrix(name.removesuffix("-short"))
    short = shipped_matrix(name)
    assert len(short.seeds) > len(long.seeds)
    for long_variant, short_variant in zip(long.variants, short.variants, strict=True):
        assert long_variant.name == short_variant.name
        assert long_variant.experiment.model == short_variant.experiment.model
        assert (
            long_variant.experiment.training.epochs == 10 * short_variant.experiment.training.epochs
        )
    assert not short.published


# docs/setups.md. LocalViT's without the 47,088 that the released code counts and nothing uses.
@pytest.mark.parametrize(
    ("study", "variant", "count"),
    [
        ("belief2-cifar100", "standard", 3_375_076),
        ("belief2-cifar100", "belief2", 3_375_076),
        ("belief2-cifar100", "belief", 3_375_076),
        ("belief2-cifar100", "belief-star", 3_375_940),
        ("belief2-cifar100", "belief2-without-ffn", 2_039_332),
        ("belief2-cifar100", "belief2-without-zz", 3_043_300),
        ("belief2-cifar100", "standard-repository-width", 2_709_796),
        ("residual-signal-cifar100", "residual=value,width=384", 2_709_796),
        # W^l of nine layers, with a bias.
        (
            "residual-signal-cifar100",
            "residual=projected+scope=both,width=384",
            2_709_796 + 9 * 192 * 193,
        ),
        ("attentionx-cifar10", "standard", 9_622_512),
        ("attentionx-cifar10", "plain-attentionx", 9_523_722),
        ("attentionx-cifar100", "attentionx", 9_668_682),
        ("beliefformer-cifar10", "belief-star", 11_198_448),
        ("beliefformer-imagenet", "standard", 22_226_776 - 47_088 - 75_648),
        ("beliefformer-imagenet", "belief", 22_226_776 - 47_088 - 75_648),
        ("beliefformer-imagenet", "belief-star", 24_000_856 - 47_088 - 75_648),
        ("beliefformer-imagenet", "learned-standard", 22_226_776 - 47_088),
        ("beliefformer-imagenet", "deit-standard", 22_050_664),
        ("belief2-imagenet", "standard", 128_539_624),
        ("belief2-imagenet", "belief-star", 128_539_624 + 3_072),
        ("belief2-imagenet", "belief2-silu", 128_539_624 - 3_072),
        ("belief2-imagenet", "belief2-silu-without-zz", 128_539_624 - 3_072 - 12 * 768**2),
        # With the tanh layer before the head.
        ("dcmha-imagenet", "standard", 21_974_632 + 384 * 385),
        ("dcmha-imagenet", "dcmha-jax", 21_974_632 + 384 * 385 + 12 * 48_384),
        ("dcmha-imagenet", "vit-m", 38_736_360 + 512 * 513),
        # Segmenter's without its encoder's classifier, which nothing uses.
        ("belief2-ade20k", "standard", 6_906_388 - 193_000),
        ("belief2-ade20k", "belief2-encoder", 6_906_388 - 193_000 + 444_672),
        ("belief2-ade20k", "belief2-identity-copy", 6_906_388 - 193_000 + 516_096 + 14 * 192),
        # nanoGPT, and modded-nanogpt's branch with W^s.
        ("beliefformer-gpt2", "standard", 123_532_032),
        ("beliefformer-gpt2", "belief-star", 130_609_920),
        ("beliefformer-gpt2", "openwebtext-belief", 123_532_032),
        ("attentionx-gpt2", "subset-attentionx-half", 124_373_760),
        # GPT-NeoX's tokens are 21 ids more than the repository's vocabulary has, in and out.
        ("dcmha-ablation", "standard", 411_255_808 + 21 * 2 * 1024),
        ("dcmha-ablation", "dcformer", 411_255_808 + 21 * 2 * 1024 + 24 * (344_064 + 2 * 64)),
        # pi of every head and position as released; pi of every head as published.
        ("mgk-wikitext103", "softmax-8", 44_018_394),
        ("mgk-wikitext103", "softmax-4", 43_494_106),
        ("mgk-wikitext103", "released-mgk-8", 44_346_074),
        ("mgk-wikitext103", "released-mgk-4", 43_657_946),
        ("mgk-wikitext103", "released-smgk-8", 44_088_026),
        ("mgk-wikitext103", "mgk-8", 44_346_074 - 16 * 8 * 2 * 255),
        ("mgk-retrieval", "readme-softmax-8", 494_594),
        ("mgk-retrieval", "readme-smgk-4", 428_806 + 2 * 2 * 3),
        ("mgk-retrieval", "readme-mgk-4", 444_934 + 2 * 2 * 3),
    ],
)
def test_parameters(study: str, variant: str, count: int) -> None:
    assert parameters(study, variant) == count


@pytest.mark.parametrize(
    ("study", "steps", "tokens"),
    [
        ("beliefformer-gpt2", 9536, 524_288),
        ("attentionx-gpt2", 600_000, 491_520),
        ("mgk-wikitext103", 500_000, 96 * 256),
        ("mgk-listops", 5000, 32 * 2048),
        ("mgk-text", 20_000, 32 * 4096),
        ("mgk-retrieval", 30_000, 32 * 4096),
        ("dcmha-ablation", 13_500, 524_288),
    ],
)
def test_published_steps_and_their_tokens(study: str, steps: int, tokens: int) -> None:
    experiment = shipped_matrix(study).variants[0].experiment
    data = experiment.data
    assert experiment.training.epochs * data.epoch_steps == steps
    assert data.batch_size * data.context == tokens
    assert data.batch_size % data.accumulate == 0


@pytest.mark.parametrize(
    "name", ["dcmha-ablation", "dcmha-scaling-834M", "dcmha-scaling-plus-1.4B"]
)
def test_rows_with_dynamic_composition_follow_the_jax_code_and_have_a_reading_of_the_text(
    name: str,
) -> None:
    variants = {variant.name: variant.experiment.model for variant in shipped_matrix(name).variants}
    for row, model in variants.items():
        compose = model.attention.compose
        if not isinstance(compose, DynamicConfig):
            continue
        is_text, is_pytorch = row.startswith("paper-"), row.startswith("pytorch-")
        if compose.projection:
            assert compose.gelu == ("exact" if is_text or is_pytorch else "tanh"), row
        if compose.gate:
            assert compose.gate_init == ("pytorch" if is_pytorch else "jax"), row
        # No configuration of DCFormer without "++" was released.
        assert model.qk_norm == (not is_text and name != "dcmha-scaling-834M"), row
        assert model.qk_norm_eps == (1e-5 if model.qk_norm and not is_pytorch else 1e-6), row
        if not is_text and not is_pytorch:
            assert variants[f"paper-{row}"].windows == model.windows, row
    assert "paper-dcformer" in variants


def test_the_retrieval_study_has_every_row_of_the_tables() -> None:
    """MGK Tables 1, 2, 5, 6 and 9: 11, 11, 4, 3 and 4 rows that no other table has."""
    published = shipped_matrix("mgk-retrieval").published
    readings = [name for name in published if name.startswith(("released-", "readme-"))]
    assert len(published) - len(readings) == 11 + 11 + 4 + 3 + 4
    # MGK's README names another batch and warm-up, so every row and reading has its variant.
    for name in published:
        assert name.startswith("readme-") or f"readme-{name}" in published, name


def test_the_ranks_of_mgk_are_those_of_a_thousand_matrices() -> None:
    """The heads of all seeds for both documents of a pair; all other records have 4 pairs."""
    matrix = shipped_matrix("mgk-retrieval")
    counts = {}
    for variant in matrix.variants:
        experiment = variant.experiment
        matrices_of_head = 2 * experiment.training.diagnostics.samples * len(matrix.seeds)
        counts[variant.name] = matrices_of_head * experiment.model.heads
    figure = {"softmax-4", "mgk-4", "mgk-2"}
    assert {counts[name] for name in figure} == {1000}
    others = [variant for variant in matrix.variants if variant.name not in figure]
    assert {variant.experiment.training.diagnostics.samples for variant in others} == {4}


def test_readings_differ_in_the_settings_that_they_name() -> None:
    experiments = {v.name: v.experiment for v in shipped_matrix("attentionx-cifar100").variants}
    assert list(experiments)[:2] == ["standard", "attentionx"]
    for name, experiment in experiments.items():
        kind = "randaugment" if name.startswith("torchvision") else "blanking-randaugment"
        assert experiment.data.augment[0].kind == kind, name
    plain = [
        name for name, experiment in experiments.items() if experiment.model.patchify == "plain"
    ]
    assert plain == ["plain-standard", "plain-attentionx"]


def test_the_segmenter_of_the_study_is_the_published_set_up() -> None:
    """Segmenter's seg_tiny_mask on ADE20K (docs/setups.md)."""
    experiments = {
        variant.name: variant.experiment for variant in shipped_matrix("belief2-ade20k").variants
    }
    experiment = experiments["standard"]
    data, model, training = experiment.data, experiment.model, experiment.training
    assert (data.kind, data.crop, data.short_side, data.long_side) == ("ade20k", 512, 512, 2048)
    assert (data.batch_size, data.drop_last, data.validation) == (8, False, 0)
    assert (model.dim, model.depth, model.heads, model.patch) == (192, 12, 3, 16)
    assert (model.drop_path, model.decoder_depth, model.decoder_dropout) == (0.1, 2, 0.1)
    assert model.stride is None
    assert model.pretrained == "vit_tiny_patch16_384.augreg_in21k_ft_in1k"
    optimizer = experiment.optimizer.model_dump(exclude={"layer_decay"})
    assert optimizer == {"kind": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 0.0}
    assert experiment.schedule.model_dump() == {"kind": "polynomial", "power": 0.9, "end": 1e-5}
    assert (training.epochs, training.evaluate_every, training.clip) == (64, 2, None)
    assert (training.precision, training.average) == ("fp32", None)
    readings = {
        name: (e.model.attention.zz, e.model.attention.residual.activation)
        for name, e in experiments.items()
        if "belief2" in name
    }
    assert readings.pop("belief2-with-zz") == (True, "identity")
    assert readings.pop("belief2-gelu") == (False, "gelu")
    assert set(readings.values()) == {(False, "identity")}
    starts = {name: experiments[name].model.attention.residual.init for name in readings}
    assert starts.pop("belief2-fresh") == "fresh"
    assert set(starts.values()) == {"copy"}


def test_the_identities_of_the_committed_results_stay() -> None:
    """Another identity would separate the committed tables from the cells that made them.

    A study can have further variants, which its committed table lacks.
    """
    recorded = json.loads(Path(__file__).with_name("identities.json").read_text())
    for study, variants in recorded.items():
        first = {job.variant: job.identity for job in shipped_matrix(study).jobs if not job.seed}
        assert {name: first.get(name) for name in variants} == variants, study
