"""Rules that join settings: each refusal names the setting and says why, and every value that its hint offers works."""

import re
import shlex

import pytest
import yaml  # type: ignore[import-untyped]

from megalite.config.clashes import full_name
from megalite.config.derive import derive
from megalite.config.overrides import of_type
from megalite.config.rule import outside
from megalite.config.rules import check
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values
from megalite.errors.problems import Problem

YARN = "rope_scaling=yarn rope_scaling_factor=4 rope_original_positions=50"
EIGHT, HIGH = "pp=4 vpp=2 num_layers=8", "rope_high_frequency_factor"
MOE, ONES = "num_experts=8 moe.ffn_hidden_size=32", "global_batch_size=32 micro_batch_size=1"

# Settings by their last words, world size, the setting that is refused, and words of the message.
BROKEN = [
    # rules
    ("hidden_size=250", 1, "hidden_size", "num_attention_heads=4"),
    ("num_key_value_heads=3", 1, "num_key_value_heads", "num_attention_heads=4"),
    ("head_size=33", 1, "head_size", "even"),
    ("hidden_size=252 num_attention_heads=12", 1, "head_size", "21"),
    ("position=learned max_positions=128", 1, "seq_length", "128"),
    ("rope_scaling_factor=8 rope_original_positions=99 rope_high_frequency_factor=1", 1, HIGH, "not above"),
    ("attention=flash device=cpu", 1, "attention", "no effect with device=cpu"),
    ("attention=cudnn precision=fp32", 1, "attention", "=auto"),
    ("attention=cudnn dropout=0.1", 1, "attention", "no effect"),
    ("attention=flex compile=false", 1, "attention", "compiled"),
    ("attention=flex pp=2 parallel.schedule=zb-h1", 2, "attention", "parallel.schedule=zb-h1"),
    ("attention=fa4 cp=2 cp_comm=ring", 2, "attention", "tiles"),
    ("attention=flex cp=4 cp_comm=alltoall+ring cross_document_attention=false", 4, "attention", "tiles"),
    ("attention=flex precision=fp64", 1, "attention", "=auto"),
    ("attention=flex head_size=8", 1, "attention", "16"),
    ("attention=flash cross_document_attention=false", 1, "attention", "documents"),
    ("attention=cudnn deterministic=true", 1, "attention", "train.deterministic=true asks for one order"),
    ("data.validation={web:[web.txt]}", 1, "data.validation", "sets are of files: data=text, hf or tokens"),
    ("cuda_graph=true device=cpu", 1, "cuda_graph", "no effect with device=cpu"),
    ("cuda_graph=true", 2, "cuda_graph", "one process, not 2"),
    ("fp8=rowwise precision=fp32", 1, "fp8", "precision=fp32"),
    ("fp8=rowwise precision=fp16", 1, "fp8", "precision=fp16"),
    ("fp8=tensorwise num_layers=2", 1, "fp8", "no others"),
    ("fp8=rowwise model.ffn_hidden_size=100", 1, "fp8", "not: [100]"),
    ("fp8=rowwise hidden_size=264 num_attention_heads=3", 1, "fp8", "[264, "),
    ("fp8=rowwise head_size=24 num_attention_heads=12 num_key_value_heads=4 tp=4", 4, "fp8", "parallel.tp=1 or 2"),
    ("fp8_weight_gradients=true", 1, "fp8_weight_gradients", "no effect with train.fp8=null"),
    ("fp8_weight_gradients=true fp8=rowwise seq_length=1016", 1, "fp8_weight_gradients", "multiple of 16 tokens"),
    ("fp8_weight_gradients=true fp8=rowwise seq_length=272 cp=2", 2, "fp8_weight_gradients", "over parallel.cp=2"),
    ("rope_scaling=yarn", 1, "rope_scaling", "no effect"),
    ("rope_scaling_factor=4", 1, "rope_original_positions", "must be set"),
    (f"{YARN}0 rope_beta_slow=32", 1, "rope_beta_fast", "not above"),
    (f"{YARN} rope_theta=1", 1, "rope_theta", "above 1"),
    (f"{YARN} rope_mscale=1", 1, "rope_mscale", "together with model.rope_mscale_all_dim=null"),
    (f"{YARN} rope_mscale=1 rope_mscale_all_dim=1 rope_attention_factor=2", 1, "rope_mscale", "factor=2.0 alone"),
    ("rope_scaling=linear rope_scaling_factor=2 rope_truncate=false", 1, "rope_truncate", "no effect with"),
    ("position=learned rope_scaling_factor=2 rope_original_positions=9", 1, "rope_scaling_factor", "no effect with"),
    ("mup_base_width=96", 1, "mup_base_width", "64 or 128 or 256"),
    (
        "mup_base_width=64 num_attention_heads=8 num_key_value_heads=2",
        1,
        "mup_base_width",
        "heads=2 with",
    ),
    ("mup_base_width=0", 1, "mup_base_width", "at least 1"),
    ("mup_base_layers=-2", 1, "mup_base_layers", "at least 1"),
    ("model.name=../up", 1, "model.name", "must match [A-Za-z0-9]"),
    ("model.name=größe", 1, "model.name", "must match"),
    ("global_batch_size=100 micro_batch_size=3", 8, "global_batch_size", "24"),
    ("global_batch_size=12 micro_batch_size=5", 4, "global_batch_size", "micro_batch_size=1 or 3"),
    ("global_batch_size=16 micro_batch_size=16", 3, "global_batch_size", "48"),
    ("global_batch_size=8", 3, "global_batch_size", "6 or 9"),
    ("tp=4 global_batch_size=8", 12, "global_batch_size", "6 or 9"),
    ("train.steps=300 warmup_steps=301", 1, "warmup_steps", "train.steps=300"),
    ("train.steps=300 lr.schedule=wsd warmup_steps=200 decay_steps=101", 1, "decay_steps", "200"),
    ("min_lr=0.01", 1, "min_lr", "optimizer.lr=0.001"),
    ("lr.schedule=table", 1, "lr.table", "must be given with lr.schedule=table, like [[0,0.1],[0.05,1],[1,0]]"),
    ("lr.schedule=table lr.table=[]", 1, "lr.table", "lr.schedule=constant or linear or cosine"),
    ("lr.table=[[0,1],[1,0]]", 1, "lr.table", "has no effect with lr.schedule=cosine"),
    *(
        (f"lr.schedule=table lr.table={table}", 1, "lr.table", flaw)
        for table, flaw in {
            "[[0,1],[0.5,1],[0.5,0]]": "entry 3 has a share that is not above the one before",
            "[[0.5,1],[0.2,0]]": "entry 2 has a share that is not above the one before",
            "[[-0.1,1],[1.5,0]]": "entry 1 has a share of the steps outside 0 to 1; entry 2 has a share",
            "[[0,1],[1,-1]]": "entry 2 has a factor that is not a number from 0 to 1e30",
            "[[0,1e300]]": "entry 1 has a factor that is not a number from 0 to 1e30",
            "[[0,1],[1]]": "entry 2 is not two finite numbers",
            "[[0,1,2]]": "entry 1 is not two finite numbers",
            "[[]]": "entry 1 is not two finite numbers",
            "[[0,nan]]": "entry 1 is not two finite numbers",
            "[[0,inf]]": "entry 1 is not two finite numbers",
        }.items()
    ),
    ("cautious=true optimizer.name=muon", 1, "cautious", "does not go with optimizer.name=muon"),
    (
        "weight_decay_schedule=to_zero optimizer.weight_decay=0",
        1,
        "weight_decay_schedule",
        "optimizer.weight_decay=0.1",
    ),
    ("betas=[0.9]", 1, "betas", "two numbers"),
    ("betas=[0.9,1.0]", 1, "betas", "below 1"),
    ("betas=[-0.1,0.9]", 1, "betas", "at least 0"),
    ("ep=2", 2, "ep", "has no effect with model.moe.num_experts=0"),
    ("tp=3 model.ffn_hidden_size=96 seq_length=255", 3, "num_attention_heads", "parallel.tp=3"),
    ("tp=4 num_attention_heads=6 hidden_size=384", 4, "num_attention_heads", "4 or 8"),
    ("tp=4 model.ffn_hidden_size=701", 4, "model.ffn_hidden_size", "700 or 704"),
    ("tp=2 num_attention_heads=25 hidden_size=1600 position=learned", 4, "num_attention_heads", "not a multiple"),
    ("tp=4 num_attention_heads=12 num_key_value_heads=6 hidden_size=240", 4, "num_key_value_heads", "nor a divisor"),
    ("tp=4 seq_length=102", 4, "seq_length", "100 or 104"),
    ("async_tp=true", 4, "async_tp", "no effect with parallel.sequence_parallel=false"),
    ("async_tp=true tp=2 compile=false", 2, "async_tp", "train.compile=true"),
    ("async_tp=true tp=2 pp=2 parallel.schedule=zb-h1", 4, "async_tp", "parallel.schedule=zb-h1"),
    ("async_tp=true tp=2 fp8=rowwise", 2, "async_tp", "train.fp8=rowwise"),
    ("async_tp=true tp=2 device=cpu", 2, "async_tp", "no effect with device=cpu"),
    ("async_tp=true tp=2 sequence_parallel=false", 2, "async_tp", "no effect with parallel.sequence_parallel=false"),
    ("sequence_parallel=true", 1, "sequence_parallel", "no effect with parallel.tp=1"),
    ("sequence_parallel=true", 8, "sequence_parallel", "no effect with parallel.tp=1"),
    ("tp=4 vocab_multiple=2", 4, "vocab_multiple", "below parallel.tp=4"),
    ("recompute_modules=[attention,norms]", 1, "recompute_modules", "choices: attention, norm"),
    ("recompute=full recompute_modules=[norm]", 1, "recompute_modules", "no effect"),
    ("recompute_layers=2", 1, "recompute_layers", "train.recompute=none"),
    ("recompute=full recompute_layers=5", 1, "recompute_layers", "num_layers=4"),
    ("order=tp-cp-pp global_batch_size=6", 2, "order", "no place for dp"),
    ("order=tp-cp-ep-dp-pp-tp", 1, "order", "none twice"),
    ("order=tp-zp", 1, "order", "tp, cp, ep, dp, pp"),
    ("nccl_options=none.yaml", 1, "nccl_options", "cannot be read: No such"),
    ("source=text", 1, "path", "data=text"),
    ("source=hf", 1, "path", "data=hf"),
    ("path=a.txt", 1, "path", "stdlib"),
    ("source=text path=a weights=[1]", 1, "weights", "must be as many as"),
    ("source=text path=[a,b] weights=[1]", 1, "weights", "must be as many as"),
    ("source=text path=[a,b] weights=[1,-1]", 1, "weights", "above 0"),
    ("source=text path=[a,b] weights=[1,nan]", 1, "weights", "finite"),
    ("vocab_size=1000", 1, "vocab_size", "4096"),
    ("tokenizer=./none", 1, "tokenizer", "no folder"),
    ("'tokenizer=by te'", 1, "tokenizer", "hub name"),
    ("tokenizer=", 1, "tokenizer", "bpe, byte, char"),
    ("init_from=none", 1, "init_from", "there is no"),
    ("run_dir='~nobody-of-this-name/x'", 1, "run_dir", "no file can have this name"),
    ("init_from=/", 1, "init_from", "there is no /config.json"),
    # experts
    ("top_k=9", 1, "top_k", "has no effect with model.moe.num_experts=0"),
    ("num_experts=8 capacity_factor=-1", 1, "capacity_factor", "above 0"),
    ("etp=1 tp=2", 2, "etp", "has no effect"),
    ("recompute=selective recompute_modules=[moe,norm]", 1, "recompute_modules", "moe has no effect"),
    ("num_experts=8 first_dense_layers=4", 1, "first_dense_layers", "leaves no layer with experts"),
    ("num_experts=8 layer_freq=5", 1, "layer_freq", "leaves no layer"),
    ("num_experts=8 layer_freq=3 first_dense_layers=2", 1, "first_dense_layers", "layer_freq=1 or 2, or"),
    ("num_experts=8 num_groups=3", 1, "num_experts", "num_groups=3"),
    ("num_experts=8 top_k_groups=2", 1, "top_k_groups", "above model.moe.num_groups=1"),
    ("num_experts=8 top_k=9", 1, "top_k", "above model.moe.num_experts=8"),
    ("num_experts=8 num_groups=4 top_k=3", 1, "top_k", "top_k=2, or model.moe.top_k_groups=3"),
    ("num_experts=8 num_groups=4 top_k_groups=2 top_k=3", 1, "top_k", "not a multiple of model.moe.top_k_groups=2"),
    ("num_experts=8 top_k=1", 1, "top_k", "learns nothing (model.moe.pre_softmax=false)"),
    ("num_experts=8 expert_bias_rate=0.001", 1, "expert_bias_rate", "score=softmax"),
    ("num_experts=8 pre_softmax=true score=sigmoid", 1, "pre_softmax", "has no effect with model.moe.score=sigmoid"),
    ("num_experts=8 normalize_weights=false", 1, "normalize_weights", "has the sum 1 as it is"),
    ("num_experts=8 capacity_factor=0.4", 1, "capacity_factor", "with model.moe.top_k=2"),
    ("num_experts=6 ep=4", 4, "num_experts", "not a multiple of parallel.ep=4"),
    ("num_experts=8 moe.ffn_hidden_size=33 tp=2", 2, "moe.ffn_hidden_size", "30 or 32 or 34, or parallel.etp=1"),
    (f"{MOE} layer_freq=2 model.ffn_hidden_size=33 tp=2", 2, "model.ffn_hidden_size", "multiple of parallel.tp=2"),
    ("num_experts=8 moe.ffn_hidden_size=33 etp=2", 2, "moe.ffn_hidden_size", "not a multiple of parallel.etp=2"),
    ("num_experts=8 moe.ffn_hidden_size=33 num_shared_experts=3 tp=2 etp=1", 2, "moe.ffn_hidden_size", "experts=3"),
    ("num_experts=8 tp=2 sequence_parallel=false", 2, "sequence_parallel", "its own part of the sequence"),
    ("num_experts=8 ep=4 instances=4", 8, "instances", "edp = 2"),
    ("num_experts=8 ep=4 pp=2 global_batch_size=12", 12, "world size", "parallel.ep=1 or 2"),
    ("num_experts=8 ep=2 etp=2 pp=2 global_batch_size=12", 12, "world size", "not a multiple of parallel.etp=2"),
    ("num_experts=8 ep=4 pp=2 order=tp-ep-pp-dp", 8, "order", "1 ranks apart for dense layers, 4 for experts"),
    # steps
    ("batch_ramp=[4]", 1, "batch_ramp", "must be three whole numbers"),
    ("batch_ramp=[8,1,90]", 1, "batch_ramp", "must lead from 8 to train.global_batch_size=8"),
    ("batch_ramp=[4,3,100]", 1, "batch_ramp", "steps of 3 must lead from 4 to train.global_batch_size=8"),
    ("batch_ramp=[2,2,100]", 4, "batch_ramp", "has batches of 2 sequences"),
    ("batch_ramp=[4,2,100] global_batch_size=16 micro_batch_size=2", 2, "batch_ramp", "has batches of 6 sequences"),
    (f"{EIGHT} {ONES} batch_ramp=[2,2,100]", 4, "batch_ramp", "has batches of 2 microbatches"),
    (f"{EIGHT} {ONES} microbatch_group_size=8 batch_ramp=[8,6,100]", 4, "batch_ramp", "has batches of 26 microbatches"),
    ("batch_ramp=[1,1,100] global_batch_size=2", 2, "batch_ramp", "has batches of 1 sequences"),
    ("skip_steps=[3,11,12] train.steps=10", 1, "skip_steps", "must be from 1 to train.steps=10, and [11, 12]"),
    ("skip_steps=[0,3]", 1, "skip_steps", "1 to train.steps=200, and [0] are not"),
    ("profile_steps=[201]", 1, "profile_steps", "[201] are not"),
    ("spike_window=64", 1, "spike_window", "no effect with train.skip_spikes=null"),
    ("skip_spikes=6 spike_window=3", 1, "spike_window", "at least 4"),
    ("skip_spikes=0", 1, "skip_spikes", "above 0"),
    ("rollback_after=3 checkpoint.interval=0", 1, "rollback_after", "no checkpoint to go back to"),
    ("rollback_after=0", 1, "rollback_after", "at least 1"),
    ("rollback_after=3 max_bad_steps=5", 1, "max_bad_steps", "no effect with train.rollback_after=3"),
    ("profile_steps=[3,4] skip_steps=[4]", 1, "profile_steps", "train.skip_steps=[4] passes over"),
    # optimizer
    ("zero=0 instances=2", 2, "instances", "no effect"),
    ("zero=0 ownership=whole", 2, "ownership", "no effect"),
    ("instances=3", 4, "instances", "dp x cp = 4"),
    ("instances=4 tp=2", 4, "instances", "dp x cp = 2"),
    ("gradient_dtype=bf16 precision=fp32", 1, "gradient_dtype", "precision=fp32"),
    ("gradient_dtype=bf16 communication_dtype=fp32 precision=bf16", 1, "communication_dtype", "twice the bytes"),
    ("communication_dtype=bf16 precision=fp64", 1, "communication_dtype", "does not go with precision=fp64"),
    ("moment_dtype=bf16 precision=fp64", 1, "moment_dtype", "fp64"),
    ("moment_dtype=bf16 betas=[0.999,0.999]", 1, "moment_dtype", "[0.999,0.999]"),
    ("optimizer.name=muon muon.dtype=bf16 precision=fp64", 1, "muon.dtype", "no effect with precision=fp64"),
    ("optimizer.name=muon muon.dtype=fp32 precision=fp64", 1, "muon.dtype", "optimizer.muon.dtype=null"),
    ("optimizer.name=muon muon.router=false", 1, "muon.router", "no effect with model.moe.num_experts=0"),
    ("optimizer.name=muon muon.scale=ratio muon.rms=0.3", 1, "muon.rms", "no effect with optimizer.muon.scale=ratio"),
    ("muon.momentum=0.9", 1, "muon.momentum", "no effect with optimizer.name=adamw"),
    ("initial_loss_scale=2", 1, "initial_loss_scale", "no effect with precision=auto"),
    ("min_loss_scale=2 precision=bf16", 1, "min_loss_scale", "no effect with precision=bf16"),
    ("loss_scale_window=2 precision=fp32", 1, "loss_scale_window", "no effect"),
    ("hysteresis=1 precision=fp64", 1, "hysteresis", "no effect"),
    ("min_loss_scale=131072 precision=fp16", 1, "min_loss_scale", "optimizer.initial_loss_scale=65536.0"),
    ("initial_loss_scale=0.5 precision=fp16", 1, "min_loss_scale", "above optimizer.initial_loss_scale=0.5"),
    # pipeline
    ("pp=2 parallel.schedule=interleaved", 2, "parallel.schedule", "several chunks of layers for each rank"),
    (f"{EIGHT} parallel.schedule=zb-h1", 4, "parallel.schedule", "one chunk of layers for each rank"),
    (f"{EIGHT} micro_batch_size=4", 4, "global_batch_size", "needs a microbatch"),
    (f"{EIGHT} global_batch_size=7", 8, "global_batch_size", "8 or 10 or 12, or world size=4"),
    (f"{EIGHT} global_batch_size=3", 8, "global_batch_size", "not a multiple of 2,"),
    (f"{EIGHT} global_batch_size=14 micro_batch_size=4", 4, "global_batch_size", "16 or 20"),
    (f"{EIGHT} global_batch_size=9 microbatch_group_size=4", 4, "microbatch_group_size", "5 or 9 or null"),
    ("pp=4 microbatch_group_size=4", 4, "microbatch_group_size", "no effect with parallel.schedule=1f1b"),
    ("pp=2 parallel.schedule=interleaved compile=true", 2, "parallel.schedule", "not parallel.vpp=1"),
    ("pp=4 parallel.schedule=zb-h1 compile=true", 4, "compile", "as parallel.schedule=zb-h1"),
    ("pp=4 num_layers=6", 4, "num_layers", "6 layers cannot be divided over 4 stages"),
    ("pp=4 num_layers=7 standalone_embedding=true", 4, "num_layers", "parallel.standalone_embedding=true"),
    ("pp=4 num_layers=7 first_stage_layers=2", 4, "num_layers", "5 layers cannot be divided over 3"),
    ("pp=4 num_layers=6 count_embedding=true", 4, "num_layers", "7 layers cannot"),
    ("pp=2 num_layers=7 pipeline_layout=Ett|tt|tt|tL", 2, "pipeline_layout", "on 4 stages, not 7 on 2"),
    ("pp=2 pipeline_layout=Ett|tt", 2, "pipeline_layout", "E, the embedding, first"),
    ("pp=2 num_layers=4 pipeline_layout=Ett|ttL count_loss=true", 2, "count_loss", "cannot be combined"),
    ("first_stage_layers=1", 2, "num_layers", "over 0 stages"),
    ("vpp=2", 2, "vpp", "virtual stages divide"),
    # context
    ("cp=2 seq_length=254", 4, "seq_length", "252 or 256"),
    ("cp=2 tp=2 seq_length=252", 4, "seq_length", "248 or 256"),
    ("cp=2 cp_comm=ring seq_length=32", 4, "seq_length", "pieces of 8 tokens, shorter than a block of 16"),
    ("cp=4 cp_comm=alltoall num_attention_heads=2", 4, "cp_comm", "do not divide over"),
    ("cp=4 cp_comm=alltoall+ring num_attention_heads=1", 4, "cp_comm", "1 key-value heads of a rank"),
    ("cp=4 cp_comm=alltoall+ring cp_alltoall=3", 4, "cp_alltoall", "parallel.cp_alltoall=2"),
    ("cp=2 cp_comm=alltoall+ring", 4, "cp_comm", "parallel.cp=2 must be a product of two sizes above 1"),
    ("cp=2 cp_alltoall=2", 4, "cp_alltoall", "has no effect with parallel.cp_comm=auto"),
    ("cp_comm=ring", 4, "cp_comm", "has no effect with parallel.cp=1"),
    ("cp=2 cp_comm=ring attention_dropout=0.1", 4, "attention_dropout", "parallel.cp_comm=alltoall"),
    ("cp=3 dropout=0.1 seq_length=192", 3, "attention_dropout", "do not divide over parallel.cp=3"),
]

FINE = [
    ("", 1),
    ("", 2),
    ("recompute=selective", 1),
    ("recompute=selective recompute_modules=[norm,attention]", 1),
    ("recompute=full recompute_layers=4", 1),
    ("recompute=full recompute_modules=[]", 1),
    *((f"tp=4 num_key_value_heads={heads}", 4) for heads in (1, 2, 4)),
    ("tp=4 seq_length=102 sequence_parallel=false", 4),
    ("order=dp-pp", 2),
    ("num_experts=8 moe.ffn_hidden_size=32 model.ffn_hidden_size=33 tp=2", 2),  # no layer has an MLP
    ("num_experts=8 ep=4 instances=2", 8),
    ("num_experts=8 ep=4 tp=2", 8),
    ("num_experts=8 num_groups=4 top_k_groups=2 top_k=4", 1),
    ("num_experts=8 score=sigmoid expert_bias_rate=0.001 top_k=1", 1),
    ("num_experts=8 top_k=1 pre_softmax=true", 1),
    ("num_experts=8 aux_loss=global aux_loss_coeff=0.0", 1),
    ("num_experts=8 recompute=selective recompute_modules=[moe]", 1),
    ("gradient_dtype=bf16 precision=bf16", 1),
    ("optimizer.name=muon muon.dtype=bf16 precision=fp32", 1),
    ("optimizer.name=muon muon.dtype=fp32 precision=bf16", 1),
    ("num_experts=8 optimizer.name=muon muon.router=false", 1),
    ("max_bad_steps=5", 1),
    ("rollback_after=3", 1),
    ("gradient_dtype=bf16", 1),
    ("communication_dtype=bf16 moment_dtype=bf16 precision=fp32", 1),
    ("communication_dtype=bf16 moment_dtype=bf16 precision=fp16", 1),
    ("moment_dtype=bf16 betas=[0.99,0.9999]", 1),
    ("communication_dtype=fp32 precision=fp64", 1),
    ("ownership=whole instances=2 bucket_size=1 overlap=false", 4),
    ("initial_loss_scale=1 min_loss_scale=1 hysteresis=1 precision=fp16", 1),
    ("zero=0 overlap=false bucket_size=1000000", 4),
    ("lr.schedule=table lr.table=[[0,0],[0.1,1],[1,0]]", 1),
    ("lr.schedule=table lr.table=[[1,0]]", 1),
    ("lr.schedule=table lr.table=[[0,1e30]]", 1),
    ("train.steps=50 lr.schedule=table lr.table=[[0,1]] warmup_steps=51 min_lr=0.01", 1),
    ("weight_decay_schedule=to_zero optimizer.name=muon optimizer.weight_decay=0 optimizer.muon.weight_decay=0.1", 1),
    ("pp=4", 4),
    ("pp=4 parallel.schedule=gpipe global_batch_size=3 micro_batch_size=1", 4),
    ("pp=4 parallel.schedule=zb-h1 compile=false", 4),
    (f"{EIGHT} global_batch_size=9", 4),
    (f"{EIGHT} microbatch_group_size=8", 4),
    ("pp=4 num_layers=6 count_embedding=true count_loss=true", 4),
    ("pp=4 num_layers=6 standalone_embedding=true", 4),
    ("pp=4 vpp=2 num_layers=12 standalone_embedding=true", 4),
    ("pp=4 num_layers=7 first_stage_layers=1", 4),
    ("pp=4 num_layers=6 first_stage_layers=0 last_stage_layers=2", 4),
    ("pp=4 num_layers=5 pipeline_layout=E|tt||t*3L", 4),
]


def config_of(line: str) -> Config:
    """A config given as `name=value` words; without Hydra, which would take most of the time."""
    words = {full_name(word.partition("=")[0]): word.partition("=")[2] for word in shlex.split(line)}
    plain = {name: yaml.safe_load(value) if value else value for name, value in words.items()}
    return with_values(Config(), {name: of_type(SETTINGS[name], value) for name, value in plain.items()})


def problems_of(line: str, world_size: int) -> list[Problem]:
    """What a setting does not allow by itself, as when it is read, or else what the rules find."""
    config = config_of(line)
    values = ((setting, value_of(config, name)) for name, setting in SETTINGS.items())
    alone = (outside(setting, value) for setting, value in values if value is not None)
    return [*filter(None, alone)] or check(config, world_size)


def follow(line: str, world_size: int, problem: Problem) -> int:
    """Takes each way out that the hint offers: the setting breaks no rule then, and no other is newly refused."""
    refused, followed = {one.setting for one in problems_of(line, world_size)}, 0
    for name, values in re.findall(
        r"(world size|[a-z0-9_.]+)=(\[\[.*\]\]|\[[^\]]*\]|[\w.-]+(?: or [\w.-]+)*)", problem.hint
    ):
        for value in values.split(" or ") if name in {*SETTINGS, "world size"} else ():
            world = int(value) if name == "world size" else world_size
            changed = line if name == "world size" else f"{line} {name}={value}"
            left = {one.setting for one in problems_of(changed, world)}
            assert left <= refused - {problem.setting}, (problem, name, value)
            followed += 1
    return followed


@pytest.mark.parametrize(("line", "world", "name", "words"), BROKEN, ids=[f"{row[0]} on {row[1]}" for row in BROKEN])
def test_a_broken_rule_names_the_setting_and_values_that_work(line: str, world: int, name: str, words: str) -> None:
    (problem,) = problems_of(line, world)
    assert problem.setting == full_name(name)
    assert words in str(problem)
    wordy = name in ("tokenizer", "run_dir", "init_from", "data.path", "nccl_options", "recompute_modules")
    assert follow(line, world, problem) or wordy or problem.hint.startswith("other values of")


@pytest.mark.parametrize(("line", "world"), FINE)
def test_what_goes_together_is_accepted_and_so_is_the_config_of_such_a_run(line: str, world: int) -> None:
    config = config_of(line)
    assert check(config, world) == check(derive(config, world), world) == []
