"""Building layers that are looked at and thrown away."""

from collections.abc import Callable
from concurrent import futures

from lingvo.core import cluster_factory


def build_apart(function: Callable, *args):
  """Runs `function(*args)`, which builds layers, and returns its result.

  Lingvo takes any layer that is built during another's __init__, on the same
  thread, for a child of it; so this is a thread of its own.
  """

  def run(cluster):
    with cluster:
      return function(*args)

  with futures.ThreadPoolExecutor(max_workers=1) as thread:
    return thread.submit(run, cluster_factory.Current()).result()
