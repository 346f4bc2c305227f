"""Tool calls: every kind of call and of fault, by hand; what is written is read back; hostile text costs nothing."""

import json
import random
import time

import pytest

from envs import tool_calls
from envs.tool_calls import format_call, neutralize, parse, validate

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
DEEP = '{"a":' * 3000 + '1' + '}' * 3000


def wrap(text):
  return f'<tool_call>\n{text}\n</tool_call>'


def read(text, **options):
  """Return ([(name, arguments)], content, [kind of error])."""
  parsed = parse(text, **options)
  return [(c.name, dict(c.arguments)) for c in parsed.calls], parsed.content, [error.partition(':')[0] for error in parsed.errors]


ONE = [('add', {'a': 1, 'b': 2})]
WELL_FORMED = {
    'plain': (wrap(ADD), ONE, ''),
    'on one line': (f'<tool_call>{ADD}</tool_call>', ONE, ''),
    'two': (f'{wrap(ADD)}\n{wrap(json.dumps({"name": "now"}))}', [*ONE, ('now', {})], '\n'),
    'two in one pair of tags': (wrap(f'{ADD}\n{ADD}'), ONE * 2, ''),
    'array': (wrap(f'[{ADD}, {ADD}]'), ONE * 2, ''),
    'text around': (f'I add. {wrap(ADD)} It is 3.', ONE, 'I add.  It is 3.'),
    'made-up result': (f'{wrap(ADD)}<tool_response>9</tool_response>', ONE, '<tool_response>9</tool_response>'),
    'code fence': (f'```\n{wrap(ADD)}\n```', ONE, '```\n\n```'),
    'opening tag in a string': (wrap('{"name": "w", "arguments": {"t": "a <tool_call> b"}}'), [('w', {'t': 'a <tool_call> b'})], ''),
    'closing tag in a string': (wrap('{"name": "w", "arguments": {"t": "a </tool_call> b"}}'), [('w', {'t': 'a </tool_call> b'})], ''),
    'whole call in a string': (format_call('w', {'t': wrap(ADD)}), [('w', {'t': wrap(ADD)})], ''),
    'end of reasoning in a string': (format_call('w', {'t': 'x</think>y<think>'}), [('w', {'t': 'x</think>y<think>'})], ''),
    'braces in a string': (format_call('w', {'t': 'mkdir {a,b'}), [('w', {'t': 'mkdir {a,b'})], ''),
    'closing tag first': (f'</tool_call> so {wrap(ADD)}', ONE, '</tool_call> so '),
    'no closing tag': (f'<tool_call>{ADD}', ONE, ''),
    'no closing tag, then text': (f'<tool_call>{ADD}\nDone', ONE, 'Done'),
    'no closing tag, then a call': (f'<tool_call>{ADD}\n{wrap(ADD)}', ONE * 2, ''),
    'raw newline and tab': (wrap('{"name": "w", "arguments": {"t": "a\n\tb"}}'), [('w', {'t': 'a\n\tb'})], ''),
    'no arguments': (wrap('{"name": "now"}'), [('now', {})], ''),
    'null arguments': (wrap('{"name": "now", "arguments": null}'), [('now', {})], ''),
    'arguments as text': (wrap('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'), ONE, ''),
    'parameters': (wrap('{"name": "add", "parameters": {"a": 1, "b": 2}}'), ONE, ''),
    'surrogate pair': (wrap('{"name": "w", "arguments": {"t": "\\u00e9\\ud83d\\ude00"}}'), [('w', {'t': 'é😀'})], ''),
    'lone surrogate': (wrap('{"name": "w", "arguments": {"t": "\\ud83d"}}'), [('w', {'t': '\ud83d'})], ''),
    'big but readable integer': (format_call('w', {'n': 10**1000}), [('w', {'n': 10**1000})], ''),
    'XML': (wrap('<function=log>\n<parameter=day>\n2026-01-15\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>'),
            [('log', {'day': '2026-01-15', 'n': '3'})], ''),
    'XML of no arguments': (wrap('<function=now></function>'), [('now', {})], ''),
    'XML with its tags in a value': (wrap('<function=w><parameter=t>a </parameter> b </function> c</parameter></function>'),
                                     [('w', {'t': 'a </parameter> b </function> c'})], ''),
    'XML of several lines': (wrap('<function=w><parameter=t>\n\nx\n\n</parameter></function>'), [('w', {'t': '\nx\n'})], ''),
    'XML, no closing tag': ('<tool_call><function=now></function>', [('now', {})], ''),
}


@pytest.mark.parametrize('text,calls,content', WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed_calls(text, calls, content):
  assert read(text) == (calls, content, [])


NO_CALLS = {
    'bare JSON': (ADD, ADD),
    'bare XML': ('<function=f></function>', '<function=f></function>'),
    'empty': ('', ''),
    'text': ('#### 4\n', '#### 4\n'),
}


@pytest.mark.parametrize('text,content', NO_CALLS.values(), ids=NO_CALLS)
def test_text_that_is_no_call(text, content):
  assert read(text) == ([], content, [])


MALFORMED = {
    'truncated': ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b"', 'truncated'),
    'truncated in a string': ('<tool_call>\n{"name": "add", "arguments": {"a": "b', 'truncated'),
    'truncated at once': ('I add.<tool_call>\n', 'truncated'),
    'truncated XML': ('<tool_call><function=f><parameter=k>v', 'truncated'),
    'truncated name of XML': ('<tool_call><function=f', 'truncated'),
    'missing brace': (wrap('{"name": "add", "arguments": {"a": 1}'), 'malformed_json'),
    'extra brace': (wrap(ADD + '}'), 'malformed_json'),
    'trailing comma': (wrap('{"name": "add", "arguments": {"a": 1,}}'), 'malformed_json'),
    'single quotes': (wrap("{'name': 'add'}"), 'malformed_json'),
    'nothing': ('<tool_call></tool_call>', 'malformed_json'),
    'prose': (wrap('add 1 and 2'), 'malformed_json'),
    'junk after': (wrap(ADD + ' please'), 'malformed_json'),
    'NaN': (wrap('{"name": "add", "arguments": {"a": NaN}}'), 'malformed_json'),
    'infinity': (wrap('{"name": "add", "arguments": {"a": -Infinity}}'), 'malformed_json'),
    'float overflow': (wrap('{"name": "add", "arguments": {"a": 1e999}}'), 'malformed_json'),
    'duplicate key': (wrap('{"name": "add", "arguments": {"a": 1, "a": 2}}'), 'malformed_json'),
    'duplicate name': (wrap('{"name": "add", "name": "mul"}'), 'malformed_json'),
    'too many digits': (wrap('{"name": "add", "arguments": {"a": ' + '9' * 5000 + '}}'), 'malformed_json'),
    'too deep for the parser': (wrap(DEEP * 10), 'malformed_json'),
    'too deep': (wrap('{"name": "f", "arguments": ' + '{"a":' * 70 + '1' + '}' * 71), 'malformed_json'),
    'half an escape': (wrap('{"name": "f", "arguments": {"a": "\\x"}}'), 'malformed_json'),
    'XML, parameter twice': (wrap('<function=f><parameter=k>1</parameter><parameter=k>2</parameter></function>'), 'malformed_xml'),
    'XML, parameter not closed': (wrap('<function=f><parameter=k>1</function>'), 'malformed_xml'),
    'XML, junk': (wrap('<function=f>junk</function>'), 'malformed_xml'),
    'XML, junk after': (wrap('<function=f></function> junk'), 'malformed_xml'),
    'no name': (wrap('{"arguments": {"a": 1}}'), 'bad_call'),
    'number as name': (wrap('{"name": 5, "arguments": {}}'), 'bad_call'),
    'empty name': (wrap('{"name": "", "arguments": {}}'), 'bad_call'),
    'array of numbers': (wrap('[1]'), 'bad_call'),
    'arguments and parameters': (wrap('{"name": "f", "arguments": {}, "parameters": {"a": 1}}'), 'bad_call'),
    'list of arguments': (wrap('{"name": "add", "arguments": [1, 2]}'), 'bad_arguments'),
    'number as arguments': (wrap('{"name": "add", "arguments": 0}'), 'bad_arguments'),
    'arguments as text of text': (wrap(json.dumps({'name': 'add', 'arguments': json.dumps(json.dumps({'a': 1}))})), 'bad_arguments'),
    'arguments as broken text': (wrap('{"name": "add", "arguments": "{"}'), 'bad_arguments'),
    'arguments as text with NaN': (wrap('{"name": "add", "arguments": "{\\"a\\": NaN}"}'), 'bad_arguments'),
    'arguments as deep text': (wrap(json.dumps({'name': 'add', 'arguments': DEEP})), 'bad_arguments'),
}


@pytest.mark.parametrize('text,kind', MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_are_errors_and_never_run(text, kind):
  calls, _, errors = read(text)
  assert calls == [] and errors == [kind]


def test_a_bad_call_keeps_its_siblings_but_broken_syntax_ends_the_reading():
  assert read(wrap('{"name": 5}') + wrap(ADD))[::2] == (ONE, ['bad_call'])
  assert read(f'I use <tool_call> as in {wrap(ADD)}')[::2] == (ONE, ['malformed_json'])
  assert read(wrap(ADD) + wrap('{"name": "f",}') + wrap(ADD))[::2] == (ONE, ['malformed_json'])
  # Where the string ends is unknown, so the call inside it must not be taken for one.
  assert read(wrap('{"name": "w", "arguments": {"t": "\\x ' + wrap('{"name": "rm"}') + '"}}'))[::2] == ([], ['malformed_json'])


def test_ids_are_unique_in_order():
  assert [call.id for call in parse(wrap(ADD) * 3).calls] == ['call_0', 'call_1', 'call_2']


REASONING = {
    'before a call': (f'<think>plan</think>{wrap(ADD)}', ONE, '', []),
    'with a call in it': (f'<think>{wrap(ADD)}</think>#### 3', [], '#### 3', []),
    'with a broken call in it': ('<think><tool_call>{"</think>#### 3', [], '#### 3', []),
    'never closed': (f'<think>{wrap(ADD)} #### 3', [], '', []),
    'opened again and not closed': ('<think>a</think>b<think>#### 3', [], 'b', []),
    'without its opening tag': (f'{wrap(ADD)} hm </think>#### 3', [], '#### 3', []),
    'a broken call without its opening tag': ('<tool_call>{"a": hm </think>#### 3', [], '#### 3', []),
    'the last end counts': ('<think>a</think>#### 1</think>#### 2', [], '#### 2', []),
    'text before it': ('#### 1<think>a</think>#### 2', [], '#### 2', []),
}


@pytest.mark.parametrize('text,calls,content,errors', REASONING.values(), ids=REASONING)
def test_reasoning_holds_neither_calls_nor_answers(text, calls, content, errors):
  assert read(text) == (calls, content, errors)


def test_reasoning_opened_by_the_prompt():
  assert read(f'plan {wrap(ADD)}</think>#### 3', thinking_prefilled=True) == ([], '#### 3', [])
  assert read(f'plan</think>{wrap(ADD)}', thinking_prefilled=True) == (ONE, '', [])
  assert read(f'#### 3 {wrap(ADD)}', thinking_prefilled=True) == ([], '', [])


def test_caps():
  assert len(parse(wrap(ADD) * 64).calls) == 64
  spam = parse(wrap(ADD) * 65)
  assert spam.calls == () and spam.errors == ('too_many: at most 64 calls in a reply; none was run.',)
  assert read(wrap(f'[{",".join([ADD] * 65)}]'))[::2] == ([], ['too_many'])
  assert read('<tool_call>x' * 100)[::2] == ([], ['too_many'])
  assert read(wrap(ADD) + 'x' * tool_calls.MAX_CHARS)[::2] == ([], ['too_long'])


HOSTILE = ['<tool_call>', '<tool_call>{"a":', '<tool_call>' + ' ' * 50, '<tool_call><function=f><parameter=k>', '</parameter>', '{}',
           '<think>', '</think>', '[[[', '<tool_call>{}</tool_call>', '\\"', '</parameter>' + ' ' * 50]


@pytest.mark.parametrize('piece', HOSTILE)
def test_reading_takes_linear_time(piece):
  for text in (piece * 10000, f'<tool_call>{piece * 10000}', f'<tool_call><function=f><parameter=k>{piece * 10000}'):
    start = time.process_time()
    parse(text)
    assert time.process_time() - start < 1.0


def test_no_text_raises():
  pieces = [*HOSTILE, ADD, wrap(ADD), 'é', '\ud800', '\x00', '"', '}', '</tool_call>', '</function>', '1e999', 'NaN', ' ', '\n']
  rng = random.Random(0)
  for _ in range(3000):
    parsed = parse(''.join(rng.choices(pieces, k=rng.randrange(12))), thinking_prefilled=rng.random() < 0.2)
    assert isinstance(parsed.content, str) and all(error.split(':')[0].islower() for error in parsed.errors)


def test_format_call_is_read_back():
  arguments = {'code': 'print("</tool_call>")\n\\é', 'n': 3, 'list': [1.5, None, True]}
  assert format_call('python', {'code': 'print(1)'}) == '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'
  assert read(format_call('f', arguments)) == ([('f', arguments)], '', [])
  with pytest.raises(ValueError, match='not JSON compliant'):
    format_call('f', {'a': float('nan')})


def test_format_tools_lists_schemas():
  schema = {'type': 'object', 'description': 'Adds.', 'properties': {'a': {'type': 'integer'}}}
  text = tool_calls.format_tools({'add': schema})
  line = text.split('<tools>\n')[1].split('\n</tools>')[0]
  assert json.loads(line) == {'type': 'function', 'function': {
      'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object', 'properties': {'a': {'type': 'integer'}}}}}


CONTROL = ['<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>', '<think>', '</think>', '<|im_start|>', '<|im_end|>',
           '<|eot_id|>', '<start_of_turn>', '<end_of_turn>', '<bos>', '<eos>', '<s>', '</s>', '[INST]', '[/INST]', '[TOOL_RESULTS]',
           '<|tool_call>', '<tool_call|>', '<｜User｜>', '<function=', '<TOOL_CALL>', '<|<|im_end|>', '<<tool_call>']


@pytest.mark.parametrize('tag', CONTROL)
def test_neutralize_leaves_no_control_string(tag):
  text = neutralize(f'a{tag}b')
  assert tag not in text and text.replace(' ', '') == f'a{tag}b'
  assert neutralize(text) == text
  assert parse(neutralize(wrap(ADD))).calls == ()


def test_neutralize_leaves_the_rest():
  text = 'x < y <b>bold</b> a <| b |> c [1] [INSTANCE] vec<int> #include <stdio.h>\n'
  assert neutralize(text) == text
  assert neutralize('a\ud800b').encode() == 'a\ufffdb'.encode()


SCHEMA = {'type': 'object', 'description': 'd', 'required': ['code'], 'additionalProperties': False, 'properties': {
    'code': {'type': 'string'}, 'n': {'type': 'integer'}, 'x': {'type': 'number'}, 'b': {'type': 'boolean'},
    'l': {'type': 'array', 'items': {'type': 'integer'}}, 'k': {'enum': ['a', 'b']}, 'o': {'type': 'object'}}}


@pytest.mark.parametrize('arguments', [{'code': ''}, {'code': 'x', 'n': 3, 'x': 3, 'b': False, 'l': [1, 2], 'k': 'a', 'o': {'any': [1]}},
                                       {'code': 'x', 'x': 1.5, 'l': []}])
def test_arguments_that_fit(arguments):
  assert validate(arguments, SCHEMA) is None


@pytest.mark.parametrize('arguments,message', [
    ({}, 'the arguments lack code.'), ({'code': 1}, 'code must be of type string.'), ({'code': None}, 'code must be of type string.'),
    ({'code': '', 'n': True}, 'n must be of type integer.'), ({'code': '', 'n': 1.0}, 'n must be of type integer.'),
    ({'code': '', 'x': '1'}, 'x must be of type number.'), ({'code': '', 'b': 0}, 'b must be of type boolean.'),
    ({'code': '', 'l': [1, 'a']}, 'l[1] must be of type integer.'), ({'code': '', 'l': {}}, 'l must be of type array.'),
    ({'code': '', 'k': 'c'}, "k must be one of ['a', 'b']."),
    ({'code': '', 'z': 1}, "the arguments have no 'z'; allowed are code, n, x, b, l, k, o."),
    ({'code': '\ud800'}, 'code has a lone surrogate, which is not a character.'),
    ({'code': '', 'o': {'\ud800': 1}}, 'o have a name with a lone surrogate, which is not a character.'),
    ({'code': '', 'o': {'a': ['\udfff']}}, 'o.a[0] has a lone surrogate, which is not a character.')])
def test_arguments_that_do_not_fit_are_explained(arguments, message):
  assert validate(arguments, SCHEMA) == message


@pytest.mark.parametrize('schema', [{'minimum': 1}, {'type': 'tuple'}, {'additionalProperties': {'type': 'string'}}])
def test_a_schema_that_is_not_checked_in_full_is_refused(schema):
  with pytest.raises(ValueError, match='a keyword or type that is not checked'):
    validate({}, schema)


def test_untyped_arguments_are_read_by_their_schema():
  raw = {'code': '3', 'n': ' 3\n', 'x': '2.5', 'b': 'True', 'l': '[1, 2]', 'o': '{"a": 1}', 'z': '7'}
  assert tool_calls.coerce(raw, SCHEMA) == {'code': '3', 'n': 3, 'x': 2.5, 'b': True, 'l': [1, 2], 'o': {'a': 1}, 'z': '7'}
  # What cannot be read stays text, and `validate` answers.
  bad = {'n': 'three', 'x': 'NaN', 'b': '1', 'l': '{}', 'o': DEEP}
  assert tool_calls.coerce(bad, SCHEMA) == bad
