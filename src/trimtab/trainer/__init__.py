"""The trainer, from a recipe to the files of a run.

    recipe    config, recipes        keys, bases, refused combinations; `requirements`: checks against the objective
    models    build_model, models    loaded or warm-started (`sft`), prepared for training, exported (`export`)
    tasks     tasks, environments    problems and prompts; episodes with tools
    rollout   rollout, engines       prompts to groups of responses, from samplers that report log-probs
    rewards   rewards, sandbox       verifiers; limits for code that a model wrote
    updates   run, loop, learner     builds a run; its steps; the updates of a step, with batches (`batch_preparation`,
                                     `packing`), the optimizer (`optim`), optional methods (`features`), statistics
                                     (`step_statistics`) and an objective given in code (`custom_objective`)
    files     trimtab.runs           metrics, trajectories, provenance; `checkpoint`: what a run resumes from

Small parts of all: `chat_template` renders, `stop` ends a run on request or without a training signal, `guard` judges
its steps, `guard_actions` returns to an earlier checkpoint, `observer` receives events and copies of the metrics,
`processes` starts workers, `registry` finds tasks and rewards by name, `seeds` derives random seeds.

Several ranks: `ranks` has the collectives, `followers` the stand-ins for parts that only the leader has. Around runs:
evaluation (accuracy of a model; `held_out` during training), lab (grids of experiments) and cluster (Ray actors).
"""
