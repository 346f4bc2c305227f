"""Event files are read back by TensorFlow's own reader, which checks every CRC."""

import math
from pathlib import Path

import pytest

from rl import event_file


@pytest.fixture(scope='module')
def read_events():
  tf = pytest.importorskip('tensorflow')
  summary_iterator = tf.compat.v1.train.summary_iterator
  return lambda directory: [list(summary_iterator(str(path))) for path in sorted(directory.iterdir())]


@pytest.mark.parametrize(('data', 'crc'), [(b'', 0), (b'123456789', 0xE3069283), (bytes(32), 0x8A9136AA)])
def test_crc_has_the_published_check_values(data, crc):
  # RFC 3720, appendix B.4, and the catalog's check value; then TFRecord's mask: rotate right by 15 bits and add.
  rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
  assert int.from_bytes(event_file._masked_crc(data), 'little') == (rotated + 0xA282EAD8) % 2**32


def test_scalars_come_back(tmp_path, read_events):
  file = event_file.EventFile(tmp_path)
  file.write(1, {'train/loss_nats': 2.5, 'speed/tokens_per_s': 12345.0})
  file.write(300, {'train/loss_nats': math.nan, 'train/grad_norm': 1e39})
  [events] = read_events(tmp_path)  # Before `close`: every write reaches the file at once.
  file.close()
  assert events[0].file_version == 'brain.Event:2'
  assert [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events[2:]][0] == (
      1, {'train/loss_nats': 2.5, 'speed/tokens_per_s': 12345.0})
  assert events[3].step == 300
  assert math.isnan(events[3].summary.value[0].simple_value)
  assert events[3].summary.value[1].simple_value == math.inf
  assert abs(events[3].wall_time - events[0].wall_time) < 60


def test_a_resumed_run_tells_tensorboard_to_forget_later_steps(tmp_path, read_events):
  for start_step in (0, 5):
    file = event_file.EventFile(tmp_path, start_step)
    file.write(start_step + 1, {'a/b': 1.0})
    file.close()
  first, second = read_events(tmp_path)
  for events, step in ((first, 1), (second, 6)):
    assert events[1].step == step
    assert events[1].session_log.status == events[1].session_log.START
    assert events[2].step == step


@pytest.mark.parametrize('step', [0, 127, 128, 255, 256, 16384])
def test_steps_of_every_size_come_back(tmp_path, read_events, step):
  file = event_file.EventFile(tmp_path)
  file.write(step, {'a/b': 1.0})
  file.close()
  assert read_events(tmp_path)[0][2].step == step


def test_long_records_keep_their_length(tmp_path, read_events):
  values = {f'eval/task_{number}': float(number) for number in range(500)}
  file = event_file.EventFile(tmp_path)
  file.write(2**40, values)
  file.close()
  [events] = read_events(tmp_path)
  assert events[2].step == 2**40
  assert {value.tag: value.simple_value for value in events[2].summary.value} == values


def test_a_full_disk_is_an_error_at_once(tmp_path):
  file = event_file.EventFile(tmp_path)
  file._file.close()
  file._file = Path('/dev/full').open('wb')  # noqa: SIM115
  with pytest.raises(OSError, match='No space left'):
    file.write(1, {'a/b': 1.0})
  with pytest.raises(OSError, match='No space left'):
    file.close()
