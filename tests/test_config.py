"""Settings: loading, overriding, checking, storing and comparing them."""

import dataclasses

import pytest

from latte.config import (
    SAME_LOSSES,
    Config,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    apply_overrides,
    check_run_dir,
    difference,
    from_json,
    load,
    read_run_config,
    settings,
    to_json,
    validate,
)
from latte.errors import UserError


@pytest.fixture
def tiny() -> Config:
    """A config of this file's own, so that no test here depends on how a run is tuned."""
    return Config(
        name="tiny",
        model=ModelConfig(width=192, layers=4, heads=4),
        optim=OptimConfig(warmup=30),
        train=TrainConfig(steps=300, batch_size=8, sequence_length=256),
    )


def sentence(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_every_setting_is_described(tiny):
    assert [s.key for s in settings(tiny) if not s.doc] == []
    assert {s.key for s in settings(tiny)} >= SAME_LOSSES


# --- loading


def test_load_takes_a_path(tmp_path, tiny):
    path = tmp_path / "mine.py"
    path.write_text("from latte.config import Config\nconfig = Config(name='mine')\n")
    assert load(str(path)) == Config(name="mine")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("config = 3", "defines no `config"),
        ("from latte.config import *\nconfig = Config(", "line 2: SyntaxError"),
        ("\nraise KeyError('a')", "line 2: KeyError"),
        (
            "from latte.config import *\nconfig = Config(name='a', modle=1)",
            "setting 'modle'",
        ),
        (
            "from latte.config import *\nconfig = Config(name='a', model=ModelConfig(widht=1))",
            "line 2: unknown setting 'widht'; did you mean model.width?",
        ),
    ],
)
def test_a_bad_config_file_is_one_sentence(tmp_path, body, words):
    path = tmp_path / "bad.py"
    path.write_text(body)
    with pytest.raises(UserError) as error:
        load(str(path))
    assert str(path) in sentence(error)
    assert words in sentence(error)


def test_an_unknown_config_names_the_nearest():
    with pytest.raises(UserError, match="did you mean latte_tiny"):
        load("latte_tinny")
    with pytest.raises(UserError, match=r"no config file nowhere\.py"):
        load("nowhere.py")


# --- overrides


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--train.steps", "100"], "train.steps", 100),
        (["--train.steps=1_000"], "train.steps", 1000),
        (["--train.steps", "1e6"], "train.steps", 1_000_000),
        (["--train.batch-size", "4"], "train.batch_size", 4),
        (["--train.steps", "1", "--train.steps", "2"], "train.steps", 2),
        (["--optim.lr", "3e-4"], "optim.lr", 3e-4),
        (["--optim.clip", "1"], "optim.clip", 1.0),
        (["--data.path", "my file.txt"], "data.path", "my file.txt"),
        (["--data.path=a=b"], "data.path", "a=b"),
        (["--data.path="], "data.path", ""),
        (["--train.keep_best"], "train.keep_best", True),
        (["--train.keep_best", "--train.steps", "1"], "train.keep_best", True),
        (["--train.tensorboard", "False"], "train.tensorboard", False),
        (["--model.norm", "layer"], "model.norm", "layer"),
        (["--model.pattern", "swa,latte_r,latte"], "model.pattern", ("swa", "latte_r", "latte")),
        (["--model.pattern=swa latte"], "model.pattern", ("swa", "latte")),
        (["--model.pattern", "swa", "latte", "--name", "x"], "model.pattern", ("swa", "latte")),
    ],
)
def test_overrides_take_the_type_of_their_field(tiny, arguments, key, value):
    changed = {s.key: s.value for s in settings(apply_overrides(tiny, arguments))}
    before = {s.key: s.value for s in settings(tiny)}
    assert changed[key] == value
    assert type(changed[key]) is type(value)
    others = {k for k in before if changed[k] != before[k]} - {key}
    assert all(f"--{other}" in arguments for other in others)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train.step", "1"], "unknown setting 'train.step'; did you mean train.steps?"),
        (["--steps", "1"], "did you mean train.steps?"),
        (["--zzz", "1"], "unknown setting 'zzz'; `latte train --help` lists them all"),
        (["--train", "1"], "'train' is a group of settings"),
        (["100"], "unexpected argument '100'"),
        (["--train.steps", "ten"], "train.steps is 'ten', but it must be a whole number"),
        (["--train.steps", "1.5"], "train.steps is '1.5', but it must be a whole number"),
        (["--train.steps", "inf"], "train.steps is 'inf', but it must be a whole number"),
        (["--train.steps", "true"], "must be a whole number"),
        (["--optim.lr", "nan"], "optim.lr is 'nan', but it must be a number"),
        (["--optim.lr"], "optim.lr has no value; it must be a number"),
        (
            ["--train.keep_best", "perhaps"],
            "train.keep_best is 'perhaps', but it must be true or false",
        ),
        (["--model.norm", "batch"], "model.norm is 'batch', but it must be one of layer, rms"),
        (["--model.pattern", "swa,lattte"], "it must be a list of attention, swa"),
    ],
)
def test_bad_overrides_are_one_sentence(tiny, arguments, words):
    with pytest.raises(UserError) as error:
        apply_overrides(tiny, arguments)
    assert words in sentence(error)


# --- what must hold


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.heads 5", "take model.heads 4 or 6 or model.width 190 or 200"),
        ("--model.width 12 --model.heads 4", "a head has 3 (model.width 12 / model.heads 4)"),
        ("--model.layers 4 --model.pattern swa,swa,latte", "take model.layers 3 or 6"),
        ("--model.pattern=", "model.pattern is empty"),
        ("--model.causal false", "would see the tokens that it is trained to predict"),
        ("--model.kv_heads 3", "take model.kv_heads 2 or 4"),
        ("--model.pattern r_swa --model.latents 3", "take model.latents 4"),
        ("--model.dropout 1", "model.dropout is 1.0"),
        ("--model.width 0", "model.width is 0, but it must be at least 1"),
        ("--model.position learned --model.max_length 10", "take model.max_length 256 or 0"),
        ("--data.heldout 0", "data.heldout is 0.0, but it must be above 0 and below 1"),
        ("--data.tokenizer byte", "did you mean bytes?"),
        ("--optim.lr 0", "optim.lr is 0.0, but it must be above 0"),
        ("--optim.warmup 301", "optim.warmup (301) is longer than train.steps (300)"),
        ("--optim.schedule wsd --optim.warmup 250", "are longer than train.steps (300)"),
        ("--optim.beta2 1", "optim.beta2 is 1.0"),
        ("--optim.spike 0.5", "optim.spike is 0.5"),
        ("--train.accumulate 3", "take train.accumulate 2 or 4"),
        ("--train.seed -1", "train.seed is -1"),
    ],
)
def test_settings_that_make_no_sense_together(tiny, arguments, words):
    with pytest.raises(UserError) as error:
        validate(apply_overrides(tiny, arguments.split()))
    assert words in sentence(error)


@pytest.mark.parametrize("arguments", ["--model.heads 4", "--model.heads 6", "--model.width 200"])
def test_the_mends_that_are_offered_work(tiny, arguments):
    start = tiny if "heads" in arguments else apply_overrides(tiny, ["--model.heads", "5"])
    validate(apply_overrides(start, arguments.split()))


def test_odd_heads_are_fine_where_nothing_rotates(tiny):
    validate(apply_overrides(tiny, ["--model.width", "12", "--model.pattern", "latte"]))


# --- a run directory


def test_json_round_trip(tiny):
    odd = apply_overrides(tiny, ["--optim.lr", "0.1234567890123456789", "--data.path", "é ü"])
    assert from_json(to_json(odd)) == odd


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"steps"', '"stepz"', "unknown setting 'train.stepz'; did you mean train.steps?"),
        ('    "steps": 300,\n', "", "has no train.steps"),
        ('"steps": 300', '"steps": "300"', "train.steps is '300', but it must be a whole number"),
        ("{", "[", "holds no config"),
    ],
)
def test_a_damaged_config_json_is_one_sentence(tiny, old, new, words):
    text = to_json(tiny)
    assert old in text
    with pytest.raises(UserError) as error:
        from_json(text.replace(old, new), "runs/a/config.json")
    assert words in sentence(error)
    assert "runs/a/config.json" in sentence(error)


def test_difference_ignores_what_no_loss_depends_on(tiny):
    operational = dataclasses.replace(
        tiny, name="b", train=dataclasses.replace(tiny.train, keep=9, log_every=1, wandb="w")
    )
    assert difference(tiny, operational) is None
    assert difference(tiny, apply_overrides(tiny, ["--model.kv_heads", "4"])) is None
    assert difference(tiny, apply_overrides(tiny, ["--model.vocab_size", "4096"])) is None
    longer = apply_overrides(tiny, ["--train.steps", "301", "--train.keep", "9"])
    assert difference(tiny, longer) == ("train.steps", 300, 301)
    fewer = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, kv_heads=2))
    assert difference(tiny, fewer) == ("model.kv_heads", 4, 2)


def test_a_run_directory_of_another_config_is_refused(tmp_path, tiny):
    check_run_dir(tmp_path, tiny)  # empty
    (tmp_path / "config.json").write_text(to_json(tiny))
    check_run_dir(tmp_path, tiny)
    assert read_run_config(tmp_path) == tiny
    other = dataclasses.replace(tiny, model=ModelConfig())
    with pytest.raises(UserError) as error:
        check_run_dir(tmp_path, other)
    assert "set --model.width 192 to go on with it" in sentence(error)


def test_the_mend_for_another_config_can_be_pasted(tmp_path, tiny):
    (tmp_path / "config.json").write_text(to_json(apply_overrides(tiny, ["--data.path", "a b"])))
    with pytest.raises(UserError, match=r"set --data\.path 'a b' to go on"):
        check_run_dir(tmp_path, tiny)


def test_a_missing_run_names_the_nearest(tmp_path, tiny):
    run = tmp_path / "runs" / "latte_tiny"
    run.mkdir(parents=True)
    (run / "config.json").write_text(to_json(tiny))
    with pytest.raises(UserError, match=r"did you mean .*latte_tiny"):
        read_run_config(tmp_path / "runs" / "latte_tin")
