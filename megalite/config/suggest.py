"""The setting that was most likely meant by an unknown one: known by other projects' word, or spelled alike."""

from megalite.config.settings import EXPERIMENT, GROUPS, SETTINGS
from megalite.errors.remedies import nearest, similarity

FOREIGN_WORDS = {  # what the same is called in nanoGPT, Megatron-LM and transformers
    "optimizer.lr": "learning_rate",
    "optimizer.betas": "beta1 beta2",
    "optimizer.clip_grad": "grad_clip",
    "optimizer.zero": "use_distributed_optimizer zero_stage",
    "optimizer.initial_loss_scale": "loss_scale",
    "train.steps": "max_iters train_iters max_steps",
    "train.global_batch_size": "batch_size",
    "train.seq_length": "block_size sequence_length",
    "model.num_layers": "n_layer num_hidden_layers",
    "model.num_attention_heads": "n_head",
    "model.hidden_size": "n_embd",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.vpp": "virtual_pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "model.moe.num_experts": "num_moe_experts num_local_experts n_routed_experts",
    "model.moe.top_k": "moe_router_topk num_experts_per_tok",
    "model.moe.ffn_hidden_size": "moe_ffn_hidden_size moe_intermediate_size",
    "model.moe.num_shared_experts": "n_shared_experts",
    "model.moe.first_dense_layers": "first_k_dense_replace",
    "model.moe.layer_freq": "moe_layer_freq decoder_sparse_step",
    "model.moe.score": "moe_router_score_function scoring_func",
    "model.moe.pre_softmax": "moe_router_pre_softmax",
    "model.moe.normalize_weights": "norm_topk_prob",
    "model.moe.scaling_factor": "moe_router_topk_scaling_factor routed_scaling_factor",
    "model.moe.num_groups": "moe_router_num_groups n_group",
    "model.moe.top_k_groups": "moe_router_group_topk topk_group",
    "model.moe.aux_loss": "moe_router_load_balancing_type",
    "model.moe.aux_loss_coeff": "moe_aux_loss_coeff router_aux_loss_coef",
    "model.moe.z_loss_coeff": "moe_z_loss_coeff",
    "model.moe.expert_bias_rate": "moe_router_bias_update_rate",
    "model.moe.capacity_factor": "moe_expert_capacity_factor",
    "model.moe.dispatcher": "moe_token_dispatcher_type",
    "precision": "dtype",
    "run_dir": "out_dir output_dir",
}
BY_WORD = {word: name for name, words in FOREIGN_WORDS.items() for word in words.split()}
LENGTH = "train.steps=N: the length of a run is in steps of train.global_batch_size x train.seq_length tokens"
INSTEAD = {  # of what there is no setting for
    **dict.fromkeys(("tokens", "train_tokens", "max_tokens", "num_train_epochs", "epochs"), LENGTH),
    "_target_": "parts are chosen by name: model=NAME, model.norm=rmsnorm, model.activation=swiglu",
}


def nearest_setting(name: str) -> str | None:
    """The setting or group that was most likely meant by the unknown dotted `name`."""
    group, _, leaf = name.rpartition(".")
    if name in SETTINGS or name in GROUPS:
        return name
    same = [BY_WORD[leaf]] if leaf in BY_WORD else [one for one in SETTINGS if one.rpartition(".")[2] == leaf]
    if same:
        return max(same, key=lambda candidate: similarity(candidate, name))
    if group in GROUPS:  # only the last word is wrong: model.layers -> model.num_layers
        own = {setting.leaf: setting.name for setting in SETTINGS.values() if setting.group == group}
        return own.get(nearest(leaf, own, cutoff=0.5) or "")
    return nearest(name, (*SETTINGS, *GROUPS, EXPERIMENT), cutoff=0.7)
