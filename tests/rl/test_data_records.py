"""Every schema's good rows, and every bad row's message."""

import json

import pytest

from rl.data import records

QA = records.schema('qa')
CHAT = records.schema('chat')
TEXT = records.schema('text')


def parse(row, schema, source='task:a.jsonl row 3'):
  return records.parse(row if isinstance(row, bytes) else json.dumps(row).encode(), schema, source)


def test_each_schema_becomes_messages():
  user, assistant = {'role': 'user', 'content': '1+1?'}, {'role': 'assistant', 'content': '2'}
  assert parse({'question': '1+1?', 'answer': '2'}, QA).messages == (user, assistant)
  assert parse({'messages': [user, assistant], 'id': 7}, CHAT).messages == (user, assistant)
  assert parse({'text': '2'}, TEXT).messages == (assistant,)
  assert parse({'text': '2'}, TEXT).source == 'task:a.jsonl row 3'


def test_fields_name_other_columns():
  schema = records.schema('qa', {'answer': 'reply'})
  assert parse({'question': 'q', 'reply': 'r', 'answer': 'not this'}, schema).messages[1]['content'] == 'r'


def test_canonical_form_does_not_depend_on_how_the_row_was_written():
  rows = (b'{"answer": "\\u00fc", "question": "q"}', '{"question":"q",  "answer":"\u00fc"}'.encode())
  first, second = (records.canonical(parse(row, QA)) for row in rows)
  assert first == second
  assert records.restore(first, 's') == records.Example(parse(rows[0], QA).messages, 's')
  chat = {'messages': [{'content': 'q', 'role': 'user'}, {'content': '\u00fc', 'role': 'assistant'}]}
  assert records.canonical(parse(chat, CHAT)) == first


def test_uniform_is_a_fixed_function_of_the_bytes_and_is_uniform():
  # blake2b of '' in 8 bytes is e4a6a0577479b2b4, published with RFC 7693 implementations; its top 53 bits over 2**53.
  assert records.uniform(b'') == (0xe4a6a0577479b2b4 >> 11) / 2**53
  values = [records.uniform(str(index).encode()) for index in range(10_000)]
  assert max(values) < 1
  # Standard deviation of a count of 10,000 draws at 0.1 is 30.
  assert abs(sum(value < 0.1 for value in values) - 1000) < 5 * 30


MESSAGE = {'role': 'assistant', 'content': 'x'}


@pytest.mark.parametrize('row, schema, message', [
    (b'{"text": ', TEXT, r'not JSON \(Expecting value: line 1 column 10.*each row must be one JSON object'),
    (b'[' * 100_000, TEXT, r'not JSON'),
    (b'{"text": "\xff"}', TEXT, r'byte 10 \(0xff\) is not UTF-8'),
    (b' \t', TEXT, r'the row is blank'),
    (b'[1]', TEXT, r"must be a JSON object, got a list: '\[1\]'"),
    (b'3', TEXT, r'must be a JSON object, got a number'),
    ({}, TEXT, r"no column 'text', which schema 'text' reads as 'text'; the row has none\. .*fields=\{'text': \.\.\.\}"),
    ({'q': 'a', 'answer': 'b'}, QA, r"no column 'question'.*the row has 'q', 'answer'"),
    ({'text': 5}, TEXT, r"column 'text' must be a string, got a number: 5"),
    ({'text': None}, TEXT, r"column 'text' must be a string, got null"),
    ({'text': ' \n'}, TEXT, r"column 'text' must not be blank, got ' \\n'"),
    ({'question': 'q', 'answer': True}, QA, r"column 'answer' must be a string, got a boolean: True"),
    (b'{"text": "a\\ud800"}', TEXT, r"column 'text' has half of a surrogate pair at character 1 \('\\ud800'\)"),
    ({'messages': 'hi'}, CHAT, r"column 'messages' must be a non-empty list of messages, got a string: 'hi'"),
    ({'messages': []}, CHAT, r"column 'messages' must be a non-empty list of messages, got a list: \[\]"),
    ({'messages': [MESSAGE, 4]}, CHAT, r'messages\[1\] must be an object with "role" and "content", got a number: 4'),
    ({'messages': [{'role': 'user'}]}, CHAT, r'messages\[0\] must have exactly the keys "role" and "content", got \'role\''),
    ({'messages': [{**MESSAGE, 'tool_calls': []}]}, CHAT, r"exactly the keys.*got 'role', 'content', 'tool_calls'"),
    ({'messages': [{'role': 'bot', 'content': 'x'}]}, CHAT, r"messages\[0\]\.role='bot' is unknown; use one of system, user, assistant, t"),
    ({'messages': [{'role': ['user'], 'content': 'x'}]}, CHAT, r"messages\[0\]\.role=\['user'\] is unknown"),
    ({'messages': [{'role': 'assistant', 'content': ['x']}]}, CHAT, r"messages\[0\]\.content must be a string, got a list: \['x'\]"),
    ({'messages': [{'role': 'user', 'content': 'x'}]}, CHAT, r'has no message with role "assistant"'),
])
def test_bad_rows(row, schema, message):
  with pytest.raises(ValueError, match=message) as error:
    parse(row, schema)
  assert str(error.value).startswith('task:a.jsonl row 3: ')
  assert len(str(error.value)) < 400


@pytest.mark.parametrize('kind, fields, message', [
    ('qaa', {}, r"schema='qaa' is unknown; use one of chat, qa, text"),
    ('qa', {'reply': 'r'}, r"fields names 'reply', which schema 'qa' does not have; it has question, answer"),
    ('qa', {'answer': ''}, r"fields\['answer'\]='' must be the name of a column"),
    ('qa', {'answer': 'question'}, r'must be in different columns'),
])
def test_bad_schemas(kind, fields, message):
  with pytest.raises(ValueError, match=message):
    records.schema(kind, fields)
