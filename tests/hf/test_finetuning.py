"""Training what was exported: gradients, checkpointing, Trainer, LoRA."""

import numpy as np
import pytest
import torch
import transformers

from tests.hf.folders import random_tokens

SOME = ["latte_r_swa", "hybrid of three", "latte"]


def loss_of(model, tokens) -> torch.Tensor:
    """In the model's own precision; that of `labels` is float32."""
    logits = model(tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gradients(model, tokens) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SOME)
def test_checkpointing_changes_no_gradient(folder, name):
    model, tokens = folder(name).load().train(), torch.as_tensor(random_tokens(2, 40))
    plain = gradients(model, tokens)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in plain.values())
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    for parameter, gradient in gradients(model, tokens).items():
        np.testing.assert_allclose(gradient, plain[parameter], atol=1e-6, err_msg=parameter)


def test_a_gradient_is_the_slope_of_the_loss(folder):
    model, tokens = folder("latte_r_swa").load().double(), torch.as_tensor(random_tokens(1, 30))
    found = gradients(model, tokens)
    rng, step = np.random.default_rng(0), 1e-5
    for name, parameter in model.named_parameters():
        way = torch.as_tensor(rng.normal(size=parameter.shape))
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * way
                ends.append(loss_of(model, tokens).item())
                parameter -= sign * step * way
        slope = (ends[0] - ends[1]) / (2 * step)
        expected = float((found[name] * way.numpy()).sum())
        np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT still asks by a name of before
@pytest.mark.parametrize("lora", [False, True])
def test_trainer_learns_rows_by_heart(folder, tmp_path, lora):
    """Padded rows, with bfloat16 autocast and gradient checkpointing."""
    pytest.importorskip("accelerate")
    made = folder("latte_r_swa")
    model = made.load()
    if lora:
        peft = pytest.importorskip("peft")
        names = ["project_q", "project_v", "project_in", "project_out"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=names))
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.path, trust_remote_code=True)
    rows = [tokenizer(text) for text in ("the cat sat on the mat", "a dog", "né")] * 4
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=30,
            per_device_train_batch_size=6,
            learning_rate=1e-2,
            bf16=True,
            activation_checkpointing=True,
            report_to=[],
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
        ),
        train_dataset=rows,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
