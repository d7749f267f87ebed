"""Two real engines with settings that are not the default: failed loads fail their request, and decode begins with its first layer."""

from meeting import Meeting
from models import model
from settings import Settings

LENGTHS = (1, 65, 128, 129, 300, 900)


def test_a_failed_load_fails_its_request_alone(alone, text):
    with Meeting(Settings(model("llama")), Settings(model("llama")), policy="fail") as meeting:
        meeting.ready()
        _, to_decode = meeting.parameters(seconds=1.0)
        meeting.decode.add("fails", text[:300], 12, to_decode)
        meeting.decode.add("plain", text[:200], 12)
        assert meeting.decode.ended("fails", 30).reason == "error"
        assert meeting.decode.ended("plain", 30).tokens == alone.tokens(text[:200], 12)
        meeting.quiet()
        assert meeting.ask("after", text[:300]) == alone.tokens(text[:300], 12)
        meeting.quiet()


def test_decode_begins_with_its_first_layer(alone, text):
    with Meeting(Settings(model("llama")), Settings(model("llama")), per_layer_start=True) as meeting:
        meeting.ready()
        for length in LENGTHS:
            prompt = [length % 256, *text][:length]
            assert meeting.ask(f"{length}", prompt, decode_first=False) == alone.tokens(prompt, 12), length
        _, to_decode = meeting.parameters(seconds=1.0)
        meeting.decode.add("late", [3, *text[:299]], 12, to_decode)  # nobody sends it: its blocks are reported, and computed again
        assert meeting.decode.ended("late", 60).tokens == alone.tokens([3, *text[:299]], 12)
        meeting.quiet()
