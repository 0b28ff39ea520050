"""Flags of other libraries: what they are here. The pages on verl and TRL have their tables from it.

Names of theirs -> flags of ours, or a phrase. Several ways are apart by " | ": a script takes the first whose
flags it has.
"""

import re
from pathlib import Path

ALGOS = Path(__file__).parents[1] / "algos"

TRL = {
    "model_name_or_path": "--model",
    "resume_from_checkpoint": "--resume",
    "use_peft": "--lora_rank",
    "lora_r": "--lora_rank",
    "lora_target_modules": "always all linear layers",
    "per_device_train_batch_size": "--train_batch_size, over all ranks, in RL in prompts",
    "gradient_accumulation_steps": "--max_tokens_per_microbatch, which bounds memory and not the batch",
    "num_generations": "--group_size",
    "num_iterations": "--ppo_epochs",
    "max_completion_length": "--max_response_length | --max_length",
    "use_vllm": "always",
    "vllm_mode": "always colocate",
    "vllm_gpu_memory_utilization": "--gpu_memory_utilization",
    "vllm_tensor_parallel_size": "--tp_size",
    "learning_rate": "--lr",
    "lr_scheduler_type": "--lr_schedule",
    "max_grad_norm": "--grad_clip",
    "epsilon": "--clip_ratio_low --clip_ratio_high",
    "epsilon_high": "--clip_ratio_high",
    "delta": "3, the constant DUAL_CLIP",
    "beta": "--use_kl_loss --kl_loss_coef | --kl_coef | --gkd_beta",
    "loss_type": "--loss | --loss_agg, of cispo and sapo --policy_loss | --policy_loss | --dft",
    "importance_sampling_level": "--policy_loss gspo, for sequence",
    "scale_rewards": "--adv_estimator dr_grpo, for none",
    "vllm_importance_sampling_correction": "--rollout_is",
    "vllm_importance_sampling_mode": "--rollout_is --rollout_rs",
    "vllm_importance_sampling_cap": "--rollout_is_threshold",
    "off_policy_mask_threshold": "--rollout_rs off_policy --rollout_rs_threshold",
    "multi_objective_aggregation": "--adv_estimator gdpo, for normalize_then_sum",
    "teacher_prompt_template": "--teacher_prompt",
    "reprompt_template": "--teacher_prompt",
    "teacher_model_kind": "--teacher_update_rate: base 0, ema between, live 1",
    "teacher_model_name_or_path": "--teacher",
    "lmbda": "--lam",
    "reward_funcs": "--reward_fn",
    "tools": "--env",
    "environment_factory": "--env",
    "max_tool_calling_iterations": "--max_turns",
    "mask_truncated_completions": "--overlong_filtering",
    "log_completions": "--rollout_dump",
    "eval_steps": "--test_freq",
    "save_steps": "--save_freq",
    "save_total_limit": "--keep_checkpoints",
    "report_to": "--tracker",
    "dataset_text_field": "--text_key",
    "packing_strategy": "--text_key, for wrapped",
    "assistant_only_loss": "always, with --messages_key",
    "center_rewards_coefficient": "--center_rewards_coef",
    "loss_weights": "--nll_coef",
    "precompute_ref_log_probs": "always",
}
VERL = {
    "actor_rollout_ref.model.path": "--model",
    "critic.model.path": "--critic_model",
    "critic.optim.lr": "--critic_lr",
    "reward_model.model.path": "--reward_model",
    "actor_rollout_ref.model.target_modules": "always all linear layers",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "--gradient_checkpointing full",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--max_tokens_per_microbatch",
    "actor_rollout_ref.actor.use_dynamic_bsz": "always, by --max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "--max_tokens_per_microbatch",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "--warmup_steps",
    "actor_rollout_ref.actor.clip_ratio_c": "3, the constant DUAL_CLIP",
    "actor_rollout_ref.actor.clip_ratio": "--clip_ratio_low --clip_ratio_high",
    "actor_rollout_ref.actor.loss_agg_mode": "--loss_agg | always token-mean",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "--sp_size",
    "actor_rollout_ref.actor.kl_loss_type": "--kl_kind (low_var_kl is k3)",
    "algorithm.use_kl_in_reward": "--kl_coef",
    "algorithm.kl_ctrl.kl_coef": "--kl_coef",
    "algorithm.kl_ctrl.target_kl": "--kl_target",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "--policy_loss (vanilla is clip)",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "--offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "--offload",
    "actor_rollout_ref.rollout.n": "--group_size | --n_samples",
    "actor_rollout_ref.rollout.name": "always vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--tp_size",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "--env",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "--env",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "--max_turns",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": "--max_observation_length, in tokens",
    "actor_rollout_ref.rollout.val_kwargs.n": "--val_group_size",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "--val_temperature",
    "algorithm.norm_adv_by_std_in_grpo": "--adv_estimator dr_grpo, for False",
    "distillation.teacher_models": "--teacher",
    "custom_reward_function.path": "--reward_fn FILE.py:NAME",
    "custom_reward_function.name": "--reward_fn FILE.py:NAME",
    "algorithm.filter_groups.enable": "what dapo.py does",
    "trainer.total_training_steps": "--total_steps",
    "trainer.default_local_dir": "--output_dir",
    "trainer.resume_mode": "--resume",
    "trainer.max_actor_ckpt_to_keep": "--keep_checkpoints",
    "trainer.logger": "--tracker",
    "trainer.project_name": "the variable WANDB_PROJECT",
    "trainer.experiment_name": "--output_dir, whose last part it is",
    "trainer.n_gpus_per_node": "nproc_per_node of torchrun",
    "trainer.nnodes": "nnodes of torchrun",
}
OTHERS = {  # LlamaFactory, OpenRLHF, ms-swift, axolotl, Hugging Face's Trainer
    "num_train_epochs": "--total_epochs",
    "num_epochs": "--total_epochs",
    "epochs": "--total_epochs",
    "max_steps": "--total_steps",
    "logging_steps": "every step is in metrics.jsonl",
    "bf16": "--compute_dtype bfloat16, the default on a GPU",
    "fp16": "--compute_dtype bfloat16 or float32",
    "torch_dtype": "--compute_dtype",
    "max_seq_length": "--max_length | --max_prompt_length --max_response_length",
    "max_seq_len": "--max_length | --max_prompt_length --max_response_length",
    "sequence_len": "--max_length | --max_prompt_length --max_response_length",
    "cutoff_len": "--max_length | --max_prompt_length --max_response_length",
    "prompt_max_len": "--max_prompt_length | --max_length",
    "generate_max_len": "--max_response_length",
    "max_new_tokens": "--max_response_length",
    "max_tokens": "--max_response_length",
    "warmup_ratio": "--warmup_steps, in steps",
    "load_in_4bit": "--qlora",
    "deepspeed": "FSDP2 shards without a file, over the ranks of torchrun",
    "zero_stage": "FSDP2 shards without a file, over the ranks of torchrun",
    "fsdp": "always, over the ranks of torchrun",
    "flash_attn": "--attn_implementation",
    "dataset_name": "--train_files | --data",
    "dataset": "--train_files | --data",
    "prompt_data": "--train_files | --data",
    "data_path": "--train_files | --data",
    "eval_dataset": "--val_files",
    "template": "--chat_template",
    "model_path": "--model",
    "pretrain": "--model",
    "batch_size": "--train_batch_size",
    "micro_train_batch_size": "--max_tokens_per_microbatch",
    "n_samples_per_prompt": "--group_size | --n_samples",
    "num_samples": "--n_samples | --group_size",
    "rollout_batch_size": "--train_batch_size",
    "kl_coef": "--use_kl_loss --kl_loss_coef | --kl_coef",
    "entropy_coef": "--entropy_coeff",
    "use_lora": "--lora_rank",
    "attn_impl": "--attn_implementation",
    "dtype": "--compute_dtype",
    "ring_attn_size": "--sp_size",
    "clip_eps_high": "--clip_ratio_high",
    "dynamic_filtering": "what dapo.py does",
    "init_kl_coef": "--kl_coef | --use_kl_loss --kl_loss_coef",
    "advantage_estimator": "--adv_estimator",
    "actor_learning_rate": "--lr",
    "critic_learning_rate": "--critic_lr",
    "eps_clip": "--clip_ratio_low --clip_ratio_high",
    "tensor_parallel_size": "--tp_size",
    "vllm_num_engines": "one on each rank, or --tp_size ranks for each",
    "colocate_all_models": "always",
    "remote_rm_url": "--reward_fn FILE.py:NAME",
    "save_path": "--output_dir",
    "save_dir": "--output_dir | --output",
    "output": "--output_dir",
    "use_wandb": "--tracker wandb",
    "wandb_project": "--tracker wandb, and the variable WANDB_PROJECT",
    "run_name": "--output_dir, whose last part it is",
    "label_smoothing_factor": "--label_smoothing",
    "pref_beta": "--beta",
    "finetuning_type": "--lora_rank",
    "lora_dropout": "no dropout is trained",
    "gradient_checkpointing_kwargs": "--gradient_checkpointing",
    "resume": "--resume",
}
HERE = {}
for table in (VERL, TRL, OTHERS):
    for name, here in table.items():
        HERE[name] = here
        last = name.rpartition(".")[2]
        if len(last) > 4:  # n, name and path end many of verl's names
            HERE[last] = here


def hint(name, flags):
    """What an unknown flag is in a script that has these flags; None: nothing is known of it.

    A hint names only flags that the script has; otherwise the scripts that have them.
    """
    last = name.rpartition(".")[2]
    if name not in HERE and last in flags:  # of verl, with its path
        return f"--{last}"
    here = HERE.get(name) or HERE.get(last)
    ways = here.split(" | ") if here else []
    for way in ways:
        if set(flags_in(way)) <= set(flags):
            return way
    for way in (*ways, f"--{last}"):
        scripts = [path.name for path in sorted(ALGOS.glob("*.py")) if has(path, flags_in(way))]
        if scripts:
            return f"{way} of {', '.join(scripts)}"
    return None


def flags_in(way):
    return re.findall(r"--(\w+)", way)


def has(script, flags):
    """Whether a script has all of some flags."""
    lines = script.read_text().splitlines()
    return bool(flags) and all(any(line.startswith(f"    {flag}: ") for line in lines) for flag in flags)
