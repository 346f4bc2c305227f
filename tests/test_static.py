"""Rules of the code base that a reader relies on: who imports whom, no assert and no print in the library, every config key read."""

import ast
import importlib
import importlib.metadata
from pathlib import Path
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
import pytest

from rl import config as config_lib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('configs', 'envs', 'launch', 'models', 'rl')
ALLOWED = {
    'configs': {'configs'},
    'envs': {'envs'},
    'models': {'models'},
    'rl': {'rl', 'models', 'envs'},
    'launch': {'launch', 'rl', 'models', 'envs', 'configs'},
}
# Third parties that a package must not import at all, or only where named.
FORBIDDEN = {'envs': {'jax', 'tensorflow', 'torch', 'transformers'}, 'configs': {'jax', 'numpy', 'tensorflow', 'torch', 'transformers'},
             'models': {'tensorflow', 'seqio', 'tensorflow_datasets', 'torch', 'transformers'}, 'rl': {'torch', 'transformers'}}
# Programs that need an extra from their first line on, and those of environments that `launch.bench` makes for peers.
OWN_PROCESS = {'envs/verifiers/math_worker.py'}
OWN_ENVIRONMENT = {'launch/peers_rl.py'}
TENSORFLOW = {'tensorflow', 'seqio', 'tensorflow_datasets'}


def modules(package):
  return sorted((ROOT / package).rglob('*.py'))


def imported(tree):
  """Yield (module name, whether the import runs when the module is imported)."""
  functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
  inside = {id(node) for function in functions for node in ast.walk(function)}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [node.module]
    else:
      continue
    for name in names:
      yield name, id(node) not in inside


@pytest.mark.parametrize('package', PACKAGES)
def test_imports_follow_the_table(package):
  wrong = []
  for path in modules(package):
    for name, at_import in imported(ast.parse(path.read_text())):
      top = name.split('.')[0]
      if top in PACKAGES and top not in ALLOWED[package]:
        wrong.append(f'{path.relative_to(ROOT)} imports {name}')
      if top in FORBIDDEN.get(package, set()):
        wrong.append(f'{path.relative_to(ROOT)} imports {name}')
      if top in TENSORFLOW and (at_import or path.parts[-2] != 'data'):
        wrong.append(f'{path.relative_to(ROOT)} imports {name} outside a function of rl/data')
      if top in ('torch', 'transformers', 'peft', 'tensorboard') and at_import:
        wrong.append(f'{path.relative_to(ROOT)} imports {name} when it is imported')
  assert not wrong


@pytest.mark.parametrize('package', PACKAGES)
def test_no_assert_no_print_no_bare_except(package):
  wrong = []
  for path in modules(package):
    for node in ast.walk(ast.parse(path.read_text())):
      is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'print'
      if isinstance(node, ast.Assert) or (is_print and package != 'launch') or (isinstance(node, ast.ExceptHandler) and node.type is None):
        wrong.append(f'{path.relative_to(ROOT)}:{node.lineno}')
  assert not wrong


def test_every_test_asserts():
  wrong = []
  for path in sorted((ROOT / 'tests').rglob('test_*.py')):
    tree = ast.parse(path.read_text())
    checkers = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and not node.name.startswith('test_') and any(
        isinstance(inner, ast.Assert) or 'raises' in ast.dump(inner) or 'assert_' in ast.dump(inner) for inner in ast.walk(node))}
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef) and node.name.startswith('test_'):
        called = {inner.func.id for inner in ast.walk(node) if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)}
        text = ast.dump(node)
        if not (any(isinstance(inner, ast.Assert) for inner in ast.walk(node)) or 'raises' in text or 'assert_' in text or called & checkers):
          wrong.append(f'{path.relative_to(ROOT)}:{node.name}')
  assert not wrong


def config_files():
  return sorted(path for path in (ROOT / 'configs').glob('*.py') if path.stem != '__init__')


@pytest.mark.parametrize('path', config_files(), ids=lambda path: path.stem)
def test_every_config_key_is_read(path):
  from launch import pipeline_plan, stages

  config = importlib.import_module(f'configs.{path.stem}').get_config()
  if config.stage == 'pipeline':
    config.model.path = 'model'  # Which it refuses to be without.
  is_run = config.stage != 'pipeline'
  record = config_lib.build(stages.find(config.stage).record if is_run else pipeline_plan.PipelineConfig, config)
  written = config_lib.to_json(record)

  def keys(tree, prefix=''):
    for key, value in tree.items():
      yield f'{prefix}{key}'
      if isinstance(value, dict):
        yield from keys(value, f'{prefix}{key}.')

  # Every key of the file is a field of the records, and every field of the records stands in the file with its comment.
  assert sorted(keys(config.to_dict())) == sorted(keys(written))


def requirements():
  """Return what setup.py asks for: {'': always, extra: with that extra}."""
  call = next(node for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text())) if isinstance(node, ast.Call))
  fields = {keyword.arg: keyword.value for keyword in call.keywords}
  lists = {'': ast.literal_eval(fields['install_requires']), **ast.literal_eval(fields['extras_require'])}
  return {extra: [Requirement(line) for line in lines] for extra, lines in lists.items()}


def test_declared_requirements_are_those_imported_and_hold_here():
  """haoliuhl/ringattention#16: what was declared was not what was needed, nor a version that works."""
  declared = {extra: {canonicalize_name(requirement.name) for requirement in lines} for extra, lines in requirements().items()}
  anywhere, wrong = set().union(*declared.values()), []
  distributions = importlib.metadata.packages_distributions()
  for package in PACKAGES:
    for path in modules(package):
      file = str(path.relative_to(ROOT))
      for name, at_import in imported(ast.parse(path.read_text())):
        top = name.split('.')[0]
        if file in OWN_ENVIRONMENT or top in PACKAGES or top in sys.stdlib_module_names:
          continue
        found = {canonicalize_name(distribution) for distribution in distributions.get(top, (top,))}
        if not found & (declared[''] if at_import and file not in OWN_PROCESS else anywhere):
          wrong.append(f'{file} imports {name}, which setup.py does not ask for')
  for requirement in requirements()['']:
    if requirement.marker is None or requirement.marker.evaluate():
      version = importlib.metadata.version(requirement.name)
      if not requirement.specifier.contains(version, prereleases=True):
        wrong.append(f'{requirement} is asked for, {version} is installed')
  assert not wrong, '\n'.join(wrong)


def run_python(code):
  return subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_importing_the_library_imports_no_tensorflow_and_envs_no_jax():
  done = run_python("import sys, models, rl, rl.train, rl.train_rl, rl.data.loader, models.transformer\n"
                    "assert not {'tensorflow', 'torch', 'seqio'} & set(sys.modules), set(sys.modules) & {'tensorflow', 'torch', 'seqio'}")
  assert done.returncode == 0, done.stderr
  done = run_python("import sys, envs, envs.checker, envs.tools, envs.verifiers.code, envs.verifiers.math, envs.sandbox.client\n"
                    "from envs import registry\nregistry.make_domain('programs/generated')\nassert 'jax' not in sys.modules")
  assert done.returncode == 0, done.stderr


def test_packages_are_those_of_this_checkout():
  for package in PACKAGES:
    assert Path(importlib.import_module(package).__file__).is_relative_to(ROOT)
