"""AdaLoRA is that of peft: the same weights and gradients -> the same loss and the same ranks. MODEL"""

import sys

import torch
from peft import AdaLoraConfig, get_peft_model
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

sys.path.insert(0, __file__.rsplit("/tests/", 1)[0])
from algos import sft
from system.ranks import leave

STEPS = 20


def main(model):
    device, mesh = sft.setup_distributed(1)
    base = dict(model=model, train_files=(), output_dir="", attn_implementation="sdpa")
    args = sft.Args(**base, lora_rank=4, lora_kind="adalora")
    policy = sft.load_model(args, mesh, device, None)
    sizes = dict(init_r=6, target_r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    schedule = dict(total_step=STEPS, tinit=2, tfinal=10, orth_reg_weight=0.1)
    lm = AutoModelForCausalLM.from_pretrained(model)
    peft = get_peft_model(lm, AdaLoraConfig(**sizes, **schedule))
    plain = {name.removeprefix("base_model.model."): layer for name, layer in peft.named_modules()}
    layers = {name: x for name, x in policy.lm.named_modules() if hasattr(x, "lora_E")}
    assert len(layers) == 14
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS // 2):
        for name, layer in layers.items():
            for part, p in sft.adaptive_parts(layer):
                other = getattr(plain[name], part)["default"]
                values = torch.randn(2, *p.shape, generator=generator)
                x, grad = (
                    distribute_tensor(v, p.device_mesh, p.placements) for v in (0.1 * values[0], values[1])
                )
                p.data.copy_(x)
                other.data.copy_(0.1 * values[0].view_as(other))
                p.grad, other.grad = grad, values[1].view_as(other).clone()
        ids = torch.arange(8) + step
        row = dict(prompt_ids=ids[:1].tolist(), response_ids=ids[1:].tolist(), trained=[True] * 7)
        with torch.no_grad():
            [logp_nt] = sft.token_logps(policy, [row])
            penalty = 0.1 * sft.orthogonality([*layers.values()])
            theirs = peft(input_ids=ids[None], labels=ids[None]).loss
        torch.testing.assert_close(penalty - logp_nt.mean(), theirs, atol=1e-5, rtol=0)
        sft.choose_ranks([*layers.values()], args, step, STEPS, finite=True)
        peft.base_model.update_and_allocate(step)
        pattern = peft.peft_config["default"].rank_pattern or {}
        assert bool(pattern) == (step > 2)
        for name, layer in layers.items():
            kept = layer.lora_kept.tolist()
            assert kept == pattern.get(f"{name}.lora_E.default", [True] * 6), (step, name)
            assert torch.equal(layer.lora_E.full_tensor(), plain[name].lora_E["default"].view(-1))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
