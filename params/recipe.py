"""How all experiments train: Adam, a warm-up and a cosine, clipping."""

from lingvo.core import optimizer, schedule

from lingvo_gpipe import pipeline_task


def set_up(p: pipeline_task.PipelineTask.Params, learning_rate: float) -> None:
  """Fills in `p.train` and `p.eval` of a task's Params."""
  p.train.Set(
    max_steps=1000,
    learning_rate=learning_rate,
    optimizer=optimizer.Adam.ParamsB(),
    clip_gradient_norm_to_value=1.0,
    lr_schedule=schedule.LinearRampupCosineSchedule.Params().Set(
      warmup_steps=50, total_steps=20_000, final_value=0.1
    ),
  )
  p.eval.samples_per_summary = 1024
