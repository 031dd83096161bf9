"""Chat templates render as models expect, in a sandbox, and fail as the client's error."""

import pytest

from gateway.chat_template import compile_template, render_chat
from router.errors import ApiError
from router.spec.fleet import ChatTemplateSpec

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


def render(text: str, **options: object) -> str:
    return render_chat(ChatTemplateSpec(text=text), HELLO, **options)  # type: ignore[arg-type]


def test_chatml_renders() -> None:
    turn = "<|im_start|>user\nHello<|im_end|>\n"
    assert render(CHATML) == turn + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == turn


@pytest.mark.parametrize(
    ("engine_adds_bos", "rendered"), [(True, "[INST] Hello"), (False, "<s>[INST] Hello")], ids=["engine", "template"]
)
def test_the_beginning_of_sequence_is_there_once(engine_adds_bos: bool, rendered: str) -> None:
    spec = ChatTemplateSpec(
        text="{{ bos_token }}[INST] {{ messages[0].content }}", bos="<s>", engine_adds_bos=engine_adds_bos
    )
    assert render_chat(spec, HELLO) == rendered


def test_templates_find_what_transformers_gives_them() -> None:
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert render("{{ tools is none }} {{ documents is none }} {{ eos_token }}") == "True True "
    assert render("{% if missing %}x{% endif %}") == ""
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_chat_template_kwargs_are_variables_but_not_the_messages() -> None:
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"
    with pytest.raises(ApiError, match="must not set bos_token, messages") as caught:
        render(CHATML, kwargs={"messages": [], "bos_token": ""})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{% for i in range(100000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_failing_template_is_a_clear_refusal(text: str, reason: str) -> None:
    with pytest.raises(ApiError, match="chat template") as caught:
        render(text)
    assert caught.value.status == 400
    assert reason in caught.value.message


def test_a_template_cannot_render_without_end() -> None:
    with pytest.raises(ApiError, match="too long"):
        render("{% for i in range(99999) %}{{ big }}{% endfor %}", kwargs={"big": "x" * 65536})


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ValueError, match="line 2"):
        compile_template("{{ 1 }}\n{% if %}")


def test_a_template_is_compiled_once() -> None:
    assert compile_template(CHATML) is compile_template(CHATML)
