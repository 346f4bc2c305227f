"""What counts as an overlap with an evaluation: the same question, or 13 words in a row; and what does not."""

import pytest

from rl.data.decontaminate import SAME_QUESTION, SHARED_WORDS, Protected, words


def chat(question, answer='It is so.', system=None):
  first = [{'role': 'system', 'content': system}] if system else []
  return [*first, {'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]


LONG = 'one two three four five six seven eight nine ten eleven twelve thirteen fourteen'


def test_words_forget_form_and_keep_arithmetic():
  assert words('What  is “2 + 3”,\nPlease?') == ['what', 'is', '2', '+', '3', 'please']
  assert words('ﬁve Straße') == ['five', 'strasse']
  assert words('2 * 3') != words('2 + 3')
  assert words('... !?') == []


def test_the_same_question_in_another_form():
  protected = Protected()
  protected.add(chat('What is 2 + 3?', 'five'), 'test row 1')
  assert protected.find(chat('what is  2 + 3', 'six')) == (SAME_QUESTION, 'test row 1')
  assert protected.find(chat('What is 2 * 3?', 'five')) is None
  assert protected.find(chat('Hello. What is 2 + 3?')) is None  # Five words are no overlap.


@pytest.mark.parametrize('count, found', [(12, None), (13, (SHARED_WORDS, 'test row 1'))])
def test_a_run_of_thirteen_words(count, found):
  protected = Protected()
  protected.add(chat(f'Count: {LONG}!'), 'test row 1')
  shared = ' '.join(LONG.split()[:count])
  assert protected.find(chat('Say it.', f'Well, {shared.upper()} -- done')) == found
  assert protected.find([{'role': 'assistant', 'content': f'a document with {shared}'}]) == found


def test_answers_are_protected_and_what_many_share_is_not():
  protected = Protected()
  protected.add(chat('Count.', LONG, system=f'You count. {LONG[::-1]} {LONG[::-1]}'), 'test row 1')
  assert protected.find(chat('How do you count?', LONG)) == (SHARED_WORDS, 'test row 1')
  assert protected.find(chat('Another one.', system=f'You count. {LONG[::-1]} {LONG[::-1]}')) is None
  assert protected.find([*chat('Another one.'), {'role': 'tool', 'content': LONG}, *chat('So?')[1:]]) is None


def test_nothing_overlaps_with_nothing():
  protected = Protected()
  assert protected.find(chat('?!')) is None
  protected.add(chat('?!', '...'), 'test row 1')
  assert protected.find(chat('?!')) is None and protected.find([{'role': 'assistant', 'content': 'a text'}]) is None


def test_the_first_source_is_named_and_ngram_is_checked():
  protected = Protected(3)
  protected.add(chat('a b c'), 'first')
  protected.add(chat('x a b c'), 'second')
  assert protected.find(chat('z a b c')) == (SHARED_WORDS, 'first')
  with pytest.raises(ValueError, match='ngram=1 must be at least 2 words'):
    Protected(1)
