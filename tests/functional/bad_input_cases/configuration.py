"""Mistakes in the configuration: unknown keys, values out of range, settings that exclude each other."""

# One case per line, however long: a table.
# fmt: off
from __future__ import annotations

from bad_input_case import Category

CATEGORIES: list[Category] = []

case = Category("Configuration")
CATEGORIES.append(case)
case("unknown key", "a key that does not exist", "'train.lrr' | did you mean 'train.lr'", "train.lrr=1")
case("unknown group", "a group that does not exist", "'studnet.hf_path' | did you mean 'student.hf_path'", "studnet.hf_path=x")
case("unlike any key", "a key like no other", "'zzz' | expected one of output, precision", "zzz=1")
case("no value", "an override without a value", "'train.lr' | expected | KEY=VALUE", "train.lr", library=r"verify: (.*); expected")
case("no such configuration", "a configuration that does not exist", "quikstart | expected one of | did you mean 'quickstart'", arguments=("--config-name", "quikstart"))
case("no such directory", "a configuration directory that does not exist", "{root}/nowhere | no such directory | expected one with verify.yaml", arguments=("--config-dir", "{root}/nowhere"))
case(
    "broken YAML", "a YAML file with a mistake", "configuration broken | expected YAML | correct it",
    prepare=lambda p: (p.root / "broken.yaml").write_text("train: {steps: 3\nseed: 1\n"),
    arguments=("--config-dir", "{root}", "--config-name", "broken"), library=r"broken: (.*); expected",
)
case(
    "unknown key in a file", "an unknown key in a YAML file", "'train.stepz' | did you mean 'train.steps'",
    prepare=lambda p: (p.root / "other.yaml").write_text("train: {stepz: 3}\n"),
    arguments=("--config-dir", "{root}", "--config-name", "other"),
)
case("text for a number", "text where a number belongs", "train.lr='fast' | expected a number", "train.lr=fast")
case("fraction of a step", "a fraction where an integer belongs", "train.steps=1.5 | expected an integer", "train.steps=1.5")
case("value for a group", "a value where a group belongs", "train=3 | expected a group of keys | train.steps", "train=3")
case("not an option", "a value that is no option", "train.schedule='linear' | expected constant | cosine", "train.schedule=linear")
case("precision", "a precision that is not there", "precision='fp16' | fp32", "precision=fp16")
case("no steps", "a run of no steps", "train.steps=0 | expected more than 0 | choose", "train.steps=0")
case("negative rate", "a negative learning rate", "train.lr=-1 | expected more than 0", "train.lr=-1")
case("rate that is no number", "a learning rate of NaN", "train.lr=nan | expected a finite number | choose", "train.lr=nan")
case("infinite rate", "an infinite learning rate", "train.lr=inf | expected a finite number", "train.lr=inf")
case("lowest above highest rate", "a final learning rate above the first", "train.min_lr=1.0 is above train.lr=1e-05 | lower it", "train.min_lr=1")
case("betas", "an Adam beta of more than 1", "[0.9, 1.5] | expected two numbers in [0, 1)", "train.betas=[0.9,1.5]")
case("top-p", "a sampling mass of 0", "rollout.top_p=0.0 | expected a number in (0, 1]", "rollout.top_p=0")
case("negative temperature", "a negative temperature", "rollout.temperature=-1.0 | expected 0 or more", "rollout.temperature=-1")
case("warm-up", "a warm-up longer than the run", "train.warmup_fraction=2.0 | expected a number in [0, 1]", "train.warmup_fraction=2")
case("zero response tokens", "evaluation with no response tokens", "evaluation.max_new_tokens=0 | expected more than 0", "evaluation.max_new_tokens=0")
case("two sources", "a model from two places", "student.checkpoint=x | expected exactly one of the two | set the other to null", "student.checkpoint=x")
case("no source", "a model from nowhere", "teacher.hf_path=None | expected exactly one of the two", "teacher.hf_path=null")
case("evaluation of nothing", "evaluation without a set", "evaluation.every=5 needs | data.validation", "evaluation.every=5")
case("ranks of a colocated teacher", "ranks for a teacher that shares them", "teacher.ranks=2 is for | set it to null", "teacher.ranks=2")
case("no teacher ranks", "a dedicated teacher without ranks", "teacher.ranks=0 | expected at least 1", "teacher.ranks=0", "teacher.placement=dedicated")
case("recompute settings without recompute", "layers to recompute where nothing is recomputed", "student.recompute_num_layers=2 | student.recompute=full, but it is none | leave them out", "student.recompute_num_layers=2")
case("recompute too much", "more layers to recompute than there are", "student.recompute_num_layers=9 | at most the model's 3 layers | choose 1 to 3", "student.recompute=full", "student.recompute_num_layers=9")
case("not there yet", "a setting of a later version", "rollout.engine=vllm | supports only rollout.engine=megatron", "rollout.engine=vllm")
case("weight without a kind", "a weight for an output-space term that there is none of", "loss.output.weight=1.0 with loss.output.kind=none | choose a kind, or weight 0", "loss.output.weight=1")
case("negative weight", "a negative weight of a term", "loss.representation.weight=-1.0 | expected 0 or more", "loss.representation.weight=-1")
case("negative weight in a stage", "a schedule with a negative weight", "loss.output.weight[1] has a weight below 0 | choose another", "loss.output.kind=full_vocab", "loss.output.weight=[{until:2,weight:0},{weight:-1}]")
case("empty schedule", "a schedule of no stages", "loss.output.weight=[] | expected a number, or at least one stage", "loss.output.weight=[]")
case("endless stage", "a schedule whose first stage has no end", "loss.representation.weight[0] has no end | give until", "loss.representation.weight=[{weight:1},{weight:2}]")
case("stages out of order", "a schedule whose stages go backwards", "loss.representation.weight[1].until=1 | expected more than 2", "loss.representation.weight=[{until:2,weight:1},{until:1,weight:2}]")
case("misspelt stage", "a schedule with an unknown key", "unknown key 'loss.representation.weight[0].untl'", "loss.representation.weight=[{untl:2,weight:1}]")
case("stage without a weight", "a schedule with a stage that has no weight", "loss.representation.weight[0]={{'until': 2}} | expected {{weight, until, start}} | give weight", "loss.representation.weight=[{until:2}]")
case("schedule that trains nothing", "schedules that leave an update without a loss", "are both 0 at update 2 | change their schedules", "loss.representation.weight=[{until:1,weight:1},{weight:0}]")
case("negative layer weight", "a layer's weight of 0", "loss.representation.layer_weights holds 0.0 | leave a layer", "loss.representation.layer_weights=[1,0,1]")
case("map of other layers", "a layer map that leaves a supervised layer out", "layer_map names the student layers [1, 3], expected the supervised ones, [1, 2, 3]", "loss.representation.layer_map={1:1,3:3}")
case("map beyond the teacher", "a layer map to a layer that the teacher hasn't", "layer_map names teacher layer 4, expected 1 to 3", "loss.representation.layer_map={1:1,2:2,3:4}")
case("too few layer weights", "fewer weights than layers", "layer_weights=[1.0, 2.0]: expected 3 weights | got 2", "loss.representation.layer_weights=[1,2]")
case("weight of another layer", "a weight for a layer that is not supervised", "a weight for layer 2 | supervised layers [1, 3]", "loss.representation.layers=[1,3]", "loss.representation.layer_weights={2:1}")
case("decay of the average", "a moving average that never moves", "loss.representation.adaptive.decay=1.0 | expected a number in [0, 1) | choose", "loss.representation.adaptive.decay=1")
case("adapting nothing", "adaptive weights of no layers", "adaptive.layers=true and positions=false with loss.representation.layers=none | expected false | choose layers", "loss.representation.adaptive.layers=true", "loss.representation.layers=none", "loss.output.kind=full_vocab", "loss.output.weight=1")
case("rows to watch", "metrics of no rows", "logging.output_metrics_rows=0 | expected more than 0", "logging.output_metrics_rows=0")
case("negative interval", "metrics in every minus second update", "logging.output_metrics_every=-2 | expected 0 or more", "logging.output_metrics_every=-2")
case("clip of one update", "a clipped ratio where there is only one update", "loss.output.clip=0.2 with loss.output.kind=sampled_token and train.updates_per_rollout=1 | set it to null", "loss.output.kind=sampled_token", "loss.output.clip=0.2")
case("clip range", "a clipping range that leaves nothing", "loss.output.clip=(0.2, 0.0) | expected a number in (0, 1], or [low, high]", "loss.output.kind=sampled_token", "loss.output.clip=[0.2,0]", "train.updates_per_rollout=2")
case("sampled token, other temperature", "the sampled token's loss at another temperature than was sampled at", "rollout.temperature=0.7 | but loss.output.temperature=1.0: expected one temperature and top_p=1 | set them", "rollout.replay=null", "loss.output.kind=sampled_token", "rollout.temperature=0.7")
case("sampled token, top-p", "the sampled token's loss where some tokens are never sampled", "rollout.top_p=0.9 | expected one temperature and top_p=1 | take another kind", "rollout.replay=null", "loss.output.kind=sampled_token", "rollout.top_p=0.9")
case("nothing to learn", "weights of 0 for both terms", "loss.representation.weight and loss.output.weight are both 0 | expected something to learn", "loss.representation.weight=0")
case("no layers, no weight", "a term without a weight, and no other", "loss.representation.weight and loss.output.weight are both 0 | expected something to learn", "loss.representation.layers=none", "loss.output.kind=full_vocab", "loss.output.weight=0")
case("no updates", "no update per rollout", "train.updates_per_rollout=0 | expected more than 0", "train.updates_per_rollout=0")
case("top-1", "a renormalised top-1", "k=1 | identically zero | kind=sampled_token", "loss.output.kind=top_k", "loss.output.k=1", "loss.output.weight=1")
case("unlikely best", "a best checkpoint by something that is not measured", "train.keep_best=val/x/avg@4 | expected null, or one of", "train.keep_best=val/x/avg@4")
case("no bridge there", "a bridge that does not exist", "nowhere/bridge.safetensors: no such file | expected a bridge made by nemo-oprd fit-bridge", "bridge.path={root}/nowhere")
case("full width that is frozen", "a full-width bridge that is not trained", "bridge.path=full_width with bridge.train=false | expected bridge.train=true | set it", "bridge.path=full_width")
case("projectors without a loss", "projectors to train and a schedule that leaves them without a loss", "bridge.train=true with a loss.representation.weight of 0 in some updates | change the schedule", "bridge.train=true", "bridge.path=full_width", "loss.output.kind=full_vocab", "loss.output.weight=1", "loss.representation.weight=[{until:1,weight:1},{weight:0}]")
case("no bridge to train", "a bridge to train where there is none", "bridge.train=true with bridge.path=none | expected a bridge to train | set bridge.path", "bridge.train=true")
case("a bridge without a loss", "a trained bridge that no loss reaches", "bridge.train=true with loss.representation.weight=0.0 | no loss reaches | expected a weight above 0", "bridge.train=true", "bridge.path=full_width", "loss.representation.weight=0")
case("trained bridge and bf16", "a trained bridge with Megatron's plain bf16 optimizer", "precision=bf16 and train.distributed_optimizer=false | expected the distributed optimizer | set train.distributed_optimizer=true", "bridge.train=true", "bridge.path=full_width", "precision=bf16", "train.distributed_optimizer=false")
case("deletion", "a deletion", "~train.lr | expected key=value | give one value", "~train.lr")
case("sweep", "a sweep over values", "train.lr=1,2 | expected key=value | not supported", "train.lr=1,2")
case("verify without rollouts", "`verify` without rollouts", "rollout.replay | set rollout.replay=FILE", command="verify", arguments=("no replay",))
