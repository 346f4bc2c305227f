"""Different problems, levels in turn, exactly as many as were asked for, also where a domain has no more."""

import pytest

from envs.core import Collection, Domain, Task
from rl.data.demonstrations import demonstrations, plain
from tests import toys


def collection(*questions):
  tasks = [Task(question, 'a', ({'role': 'assistant', 'content': f'to {question}', 'name': 'x'},), f'{number}') for number, question in
           enumerate(questions)]
  return Domain('toy/list', 1, Collection('toy/list', tasks, 0.0), toys.Exact())


def asked(found):
  return [messages[0]['content'] for messages in found]


def test_all_that_a_domain_has_and_no_more():
  domain = collection('p', 'q', 'p', 'r')
  assert asked(demonstrations(domain, [1], 'train', 3)) == ['p', 'q', 'r']
  with pytest.raises(ValueError, match=r"toy/list has only 3 different problems of levels \[1\] in split 'train'; lower the count"):
    list(demonstrations(domain, [1], 'train', 4))


def test_rows_have_role_and_content_alone():
  messages, = demonstrations(collection('p'), [1], 'train', 1)
  assert plain(messages) == [{'role': 'user', 'content': 'p'}, {'role': 'assistant', 'content': 'to p'}]
