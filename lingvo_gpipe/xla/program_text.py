"""Reads the text of an optimised program: who talks to whom, and where."""

import collections
import re

_KINDS = (
  'collective-permute',
  'all-reduce',
  'all-gather',
  'all-to-all',
  'reduce-scatter',
)
_COLLECTIVE = re.compile(rf' ({"|".join(_KINDS)})(?:-start)?\(')
_CALLED = re.compile(r'(?:body|condition|calls|to_apply)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')


def collectives(text: str) -> dict[str, int]:
  """Returns how often a program has each kind of collective."""
  return dict(collections.Counter(_COLLECTIVE.findall(text)))


def in_ticks(text: str) -> dict[str, int]:
  """Returns the collectives inside the loops over the ticks of a pipeline.

  These are the loops in which cores send to their neighbours and that have
  loops inside of them; what they call counts too.
  """
  lines = _lines_by_computation(text)
  bodies = set(re.findall(r'body=%?([\w.\-]+)', text))
  found = collections.Counter()
  for name in bodies & lines.keys():
    own = '\n'.join(lines[name])
    if 'collective-permute' in collectives(own) and ' while(' in own:
      for called in _reachable(name, lines):
        found.update(collectives('\n'.join(lines[called])))
  return dict(found)


def _lines_by_computation(text):
  lines, name = {}, None
  for line in text.splitlines():
    start = re.match(r'(?:ENTRY )?%?([\w.\-]+) .*\{$', line)
    if start:
      name = start.group(1)
      lines[name] = []
    elif name:
      lines[name].append(line)
  return lines


def _reachable(name, lines):
  found, pending = {name}, [name]
  while pending:
    for line in lines[pending.pop()]:
      called = set(_CALLED.findall(line))
      for branches in _BRANCHES.findall(line):
        called.update(re.findall(r'%?([\w.\-]+)', branches))
      called = (called & lines.keys()) - found
      found |= called
      pending += called
  return found
