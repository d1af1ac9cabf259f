"""TPU slices that need not exist, and what compiling for them says."""

import dataclasses
import re
import time

from lingvo_gpipe import errors
from lingvo_gpipe.xla import environment, program_text
from lingvo_gpipe.xla import lowered as lowered_lib


@dataclasses.dataclass(frozen=True)
class Report:
  """What the compiler says of a program.

  Attributes:
    fits: whether it accepts the program.
    seconds: it took.
    peak: bytes of a core at most, 0 where it does not fit.
    arguments: bytes of a core for weights, slots and the batch.
    temporaries: bytes of a core for all else, by another count: the two
      together are more than the peak.
    flops: of a core, in one turn of each loop.
    collectives: how many of each kind there are in the program.
    text: the optimised program, or why it does not fit.
  """

  fits: bool
  seconds: float
  peak: int = 0
  arguments: int = 0
  temporaries: int = 0
  flops: float = 0.0
  collectives: dict[str, int] = dataclasses.field(default_factory=dict)
  text: str = ''


def devices(name: str) -> list:
  """Returns the devices of a slice, such as "v5e:2x4".

  Raises:
    UserError: there is no such slice, or libtpu is missing.
  """
  environment.prepare()
  try:
    import libtpu  # noqa: F401
    from jax.experimental import topologies
  except ImportError as error:
    raise errors.UserError(
      f'{error.name} is missing: install lingvo_gpipe[tpu].'
    ) from error
  more = {}
  if re.fullmatch(r'[^:]*:(1x)*1', name):
    more['chips_per_host_bounds'] = [1, 1, 1]
  try:
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name=name, **more
    )
  except Exception as error:
    first_line, *_ = str(error).splitlines() or ['']
    raise errors.UserError(
      f'--topology={name}: the TPU compiler knows no such slice '
      f'({first_line}). Examples: v5e:2x4, v6e:2x2, v4:2x2x1.'
    ) from error
  return list(topology.devices)


def compile_for(lowered: lowered_lib.Lowered, cores: list) -> Report:
  """Compiles a step for the first devices of a slice.

  Raises:
    UserError: the slice has fewer devices than the step has cores.
  """
  # jax looks at the environment when it is imported.
  from lingvo_gpipe.xla import executable

  count = lowered.mesh.num_cores
  if len(cores) < count:
    raise errors.UserError(
      f'The slice has {len(cores)} cores, {count} are needed: choose a larger '
      'one, or fewer stages or replicas.'
    )
  start = time.monotonic()
  try:
    compiled = executable.compile_step(lowered, cores[:count])
  except Exception as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Report(False, time.monotonic() - start, text=str(error))
  seconds = time.monotonic() - start
  stats = compiled.get_compiled_memory_stats()
  [module] = compiled.hlo_modules()
  text = module.to_string()
  costs = compiled.cost_analysis()
  [costs] = costs if isinstance(costs, (list, tuple)) else [costs]
  return Report(
    fits=True,
    seconds=seconds,
    peak=stats.peak_memory_in_bytes,
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    flops=costs.get('flops', 0.0),
    collectives=program_text.collectives(text),
    text=text,
  )


def memory(cores: list) -> int:
  """Returns the bytes that a core's memory has for programs.

  The compiler tells when it refuses one; so it is asked for too much.
  """
  from lingvo_gpipe.xla import executable

  # 64 arrays of 8 GiB.
  array = 'tensor<262144x8192xf32>'
  arguments = ', '.join(f'%x{j}: {array}' for j in range(64))
  code = f"""
    module @too_much {{
      func.func public @main({arguments}) -> {array} {{
        %y = stablehlo.add %x0, %x1 : {array}
        return %y : {array}
      }}
    }}"""
  try:
    executable.compile_text(code, cores[:1])
  except Exception as error:
    found = re.search(r'of ([\d.]+)([MG]) hbm', str(error))
    if found:
      number, unit = found.groups()
      return int(float(number) * {'M': 2**20, 'G': 2**30}[unit])
  return 0
