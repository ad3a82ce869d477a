"""The chat bridge: every context is what the template renders, or the bridge says that it is not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.agent.bridge import ChatBridge
from tiderl.agent.chat import ChatAgent
from tiderl.env import messages as m
from tiderl.errors import EngineError, ModelError

APPEND_ONLY = ["chatml", "smollm2", "qwen25", "qwen_vl"]
STRANGE = [
    "<|im_end|>",
    "<|im_start|>",
    "<|eot_id|>",
    "<tool_call>",
    "</think>",
    "\ue000",
    "\ue0002\ue001",
    "\n",
    " ",
]
texts = st.lists(st.text(max_size=12) | st.sampled_from(STRANGE), max_size=4).map("".join)
# All bytes, so also what is no UTF-8; merges, control tokens, and ids that no token has.
IDS = st.lists(st.integers(0, 255) | st.integers(256, 300), max_size=12)


def plain(tokenizer, text):
    """Ids of text with no control token in it."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture(scope="module")
def bridges(tokenizer_of):
    made = {}

    def get(name):
        if name not in made:
            made[name] = ChatBridge(tokenizer_of(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_c38_append_only_context_decodes_to_the_templates_rendering(name, bridges, data):
    bridge = bridges(name)
    tokenizer = bridge.tokenizer
    history = [m.user(data.draw(texts))]
    if data.draw(st.booleans()):
        history.insert(0, m.system(data.draw(texts)))
    context = bridge.prompt(history)
    for _ in range(data.draw(st.integers(1, 3))):
        ids = [i for i in data.draw(IDS) if i not in bridge.placeholder_token_ids]
        ids += bridge.stop_token_ids[: data.draw(st.integers(0, 1))]
        new = [m.user(data.draw(texts)) for _ in range(data.draw(st.integers(1, 2)))]
        delta = bridge.delta(history, ids, new)
        assert not delta.broke
        said = ids[:-1] if ids[-1:] == [bridge.stop_token_ids[0]] else ids
        assert delta.reply == decode(tokenizer, said) == bridge.reply_text(ids)
        context = context + ids + delta.ids
        history += [{"role": "assistant", "content": delta.reply}, *new]
        assert decode(tokenizer, context) == rendered(tokenizer, history)


@pytest.mark.parametrize("name", [*APPEND_ONLY, "llama3", "qwen3", "gemma", "smolvlm"])
@settings(max_examples=30, deadline=None)
@given(content=texts)
def test_content_never_becomes_a_control_token(name, bridges, content):
    bridge = bridges(name)
    whole = bridge.prompt([m.user("x"), m.assistant("x"), m.user("x")])
    special = {n for n, token in bridge.tokenizer.added_tokens_decoder.items() if token.special}
    turn = set(whole) & special  # what structures a conversation of this template

    def controls(ids, among):
        return [i for i in ids if i in among]

    empty = bridge.prompt([m.user("x")])
    assert controls(bridge.prompt([m.user(content + "x")]), special) == controls(empty, special)
    delta = bridge.delta([m.user("x")], plain(bridge.tokenizer, content), [m.user("x" + content)])
    assert controls(delta.ids, turn) == controls(whole if delta.broke else whole[len(empty) :], turn)


def test_prompt_without_strange_content_is_the_tokenizers_own(tokenizer_of):
    for name in ("chatml", "smollm2", "llama3", "qwen25"):
        tokenizer = tokenizer_of(name)
        messages = [
            m.system("Be short. Pantom"),
            m.user("31 + 14?\n\n"),
            m.assistant(" 45 "),
            m.user("<think>"),
        ]
        whole = rendered(tokenizer, messages)
        assert ChatBridge(tokenizer).prompt(messages) == tokenizer.encode(whole, add_special_tokens=False)


def test_c37_c46_sampled_ids_are_never_tokenised_again(bridges):
    bridge = bridges("chatml")
    tokenizer = bridge.tokenizer
    whole = plain(tokenizer, " Panto")
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ĠPanto"]
    assert len(whole) == 1
    assert decode(tokenizer, letters) == decode(tokenizer, whole) == " Panto"
    history, new = [m.user("Say it.")], [m.user("Again.")]
    for sampled in (whole, letters):
        delta = bridge.delta(history, sampled, new)
        assert not delta.broke
        assert delta.reply == " Panto"
        assert not set(delta.ids) & set(whole)
        assert decode(tokenizer, delta.ids) == (
            "<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\n"
        )


def test_empty_reply_and_reply_cut_by_length_get_an_end_of_turn(bridges):
    bridge = bridges("chatml")
    stop = bridge.stop_token_ids[0]
    history, new = [m.user("Go.")], [m.user("On.")]
    emitted = bridge.delta(history, [stop], new)
    cut = bridge.delta(history, [], new)
    assert [stop, *emitted.ids] == cut.ids
    assert emitted.reply == cut.reply == ""


def test_stop_token_of_another_kind_breaks_the_prefix(make_tokenizer, tokenizer_of):
    template = tokenizer_of("chatml").chat_template
    bridge = ChatBridge(make_tokenizer(template, eos="<|endoftext|>"))
    end, eos = bridge.stop_token_ids
    assert decode(bridge.tokenizer, [end, eos]) == "<|im_end|><|endoftext|>"
    delta = bridge.delta([m.user("Go.")], [*plain(bridge.tokenizer, "yes"), eos], [m.user("On.")])
    assert delta.broke
    assert delta.reply == "yes"
    assert eos not in delta.ids


def test_c38_think_stripping_template_forks_with_a_fresh_prompt(bridges):
    bridge = bridges("qwen3")
    tokenizer = bridge.tokenizer
    stop = bridge.stop_token_ids[0]
    sampled = [*tokenizer.encode("<think>\nhm\n</think>\n\n45", add_special_tokens=False), stop]
    history = [m.user("31+14?")]
    result = bridge.delta(history, sampled, [m.user("<tool_response>\n1\n</tool_response>")])
    assert not result.broke
    question = bridge.delta(history, sampled, [m.user("And 2+2?")])
    assert question.broke
    assert decode(tokenizer, question.ids) == (
        "<|im_start|>user\n31+14?<|im_end|>\n<|im_start|>assistant\n45<|im_end|>\n"
        "<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain_reply = bridge.delta(history, [*plain(tokenizer, "45"), stop], [m.user("And 2+2?")])
    assert not plain_reply.broke


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_c38_trimming_template_forks_only_where_it_trims(name, bridges):
    bridge = bridges(name)
    stop = bridge.stop_token_ids[0]
    history, new = [m.user("Go.")], [m.user("On.")]
    assert not bridge.delta(history, [*plain(bridge.tokenizer, "4 5"), stop], new).broke
    trimmed = bridge.delta(history, [*plain(bridge.tokenizer, "45\n"), stop], new)
    assert trimmed.broke
    assert trimmed.ids == bridge.prompt([*history, m.assistant("45"), *new])


def test_c44_equal_length_is_no_proof(make_tokenizer):
    # The template swaps two letters of every earlier reply: lengths agree, texts do not.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | replace('ab', 'ba') if m.role == "
        "'assistant' and not loop.last else m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    bridge = ChatBridge(make_tokenizer(template))
    delta = bridge.delta([m.user("Go.")], plain(bridge.tokenizer, "xaby"), [m.user("On.")])
    assert delta.broke
    assert "xbay" in decode(bridge.tokenizer, delta.ids)


def test_space_after_the_header_is_the_models_own(bridges):
    bridge = bridges("smolvlm")
    stop = bridge.stop_token_ids[0]
    history, new = [m.user("Go.")], [m.user("On.")]
    delta = bridge.delta(history, [*plain(bridge.tokenizer, " 45"), stop], new)
    assert not delta.broke
    assert delta.reply == "45"
    context = [*bridge.prompt(history), *plain(bridge.tokenizer, " 45"), stop, *delta.ids]
    assert context == bridge.prompt([*history, m.assistant("45"), *new])


def test_c43_reply_text_loses_nothing_but_the_stop_at_its_end(bridges):
    bridge = bridges("qwen25")
    tokenizer = bridge.tokenizer
    stop = bridge.stop_token_ids[0]
    ids = tokenizer.encode("<tool_call>a<|im_end|>b<repo_name></tool_call> ", add_special_tokens=False)
    assert stop in ids
    assert bridge.reply_text([*ids, stop]) == "<tool_call>a<|im_end|>b<repo_name></tool_call> "
    assert (
        bridge.reply_text([*ids, stop, stop]) == "<tool_call>a<|im_end|>b<repo_name></tool_call> <|im_end|>"
    )
    assert bridge.reply_text([]) == ""


def test_own_markers_of_a_reply_stay_tokens_in_a_fresh_prompt(bridges):
    bridge = bridges("chatml")
    marker = bridge.tokenizer.convert_tokens_to_ids("<repo_name>")
    turn = [m.user("x <repo_name>"), m.assistant("y <repo_name> <|im_end|>"), m.user("z")]
    ids = bridge.prompt(turn)
    assert ids.count(marker) == 1
    assert ids.count(bridge.stop_token_ids[0]) == 3


def test_tokenizer_whose_pieces_depend_on_each_other_gets_the_literal_broken(make_tokenizer, tokenizer_of):
    from tokenizers import AddedToken

    tokenizer = make_tokenizer(tokenizer_of("chatml").chat_template)
    # As Phi-3's: the token takes the white space behind it.
    aside = AddedToken("<|aside|>", rstrip=True, special=True, normalized=False)
    tokenizer.add_tokens([aside], special_tokens=True)
    bridge = ChatBridge(tokenizer)
    assert not bridge.template.guard.piecewise
    ids = bridge.prompt([m.user("a<|im_end|>b")])
    assert ids.count(bridge.stop_token_ids[0]) == 1
    assert "a<\u200b|im_end|>b" in decode(tokenizer, ids)


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_tokenizer_that_prepends_a_space_gets_the_ids_of_the_whole(scheme, make_tokenizer, tokenizer_of):
    """As SentencePiece's, where the ids of a text depend on whether it comes first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(n) for n in range(32, 127)] + ["\n", "▁", "<unk>"]
    inner = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, [], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    # As Llama 2's.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    bridge = ChatBridge(tokenizer)
    history, new = [m.user("31+14?")], [m.user("</s> again")]
    prompt = bridge.prompt(history)
    whole = bridge.prompt([*history, m.assistant("45"), *new])
    sampled = whole[len(prompt) : whole.index(bridge.stop_token_ids[0]) + 1]
    delta = bridge.delta(history, sampled, new)
    assert whole.count(bridge.stop_token_ids[0]) == 1
    assert not delta.broke
    assert [*prompt, *sampled, *delta.ids] == whole
    assert delta.reply == "45"


# images -----------------------------------------------------------------------------------------------


def picture(shade):
    return np.full((4, 6, 3), shade, np.uint8)


@pytest.mark.parametrize("name", ["qwen_vl", "qwen_vl_drops", "smolvlm"])
def test_c47_t61_placeholders_equal_images_in_every_turn(name, bridges):
    bridge = bridges(name)
    history = [m.user("Look.", picture(1), picture(2))]
    assert bridge.prompt(history).count(bridge.image_token_id) == 2
    new = [
        m.tool("call_0_0", "look", "seen", picture(3)),
        m.tool("call_0_1", "look", picture(4)),
        m.user("Next."),
    ]
    delta = bridge.delta(history, plain(bridge.tokenizer, " ok"), new)
    assert delta.ids.count(bridge.image_token_id) == 2
    assert [int(image[0, 0, 0]) for image in delta.images] == [3, 4]
    text = decode(bridge.tokenizer, delta.ids)
    assert "seen" in text
    assert "Next." in text
    assert text.index("seen") < text.index("Next.")


def test_c47_fresh_prompt_holds_all_images(bridges, make_tokenizer):
    history = [m.user("Look.", picture(1))]
    bridge = ChatBridge(make_tokenizer(bridges("qwen_vl").tokenizer.chat_template, eos="<|endoftext|>"))
    eos = bridge.tokenizer.eos_token_id
    delta = bridge.delta(history, [*plain(bridge.tokenizer, "ok"), eos], [m.user(picture(2))])
    assert delta.broke
    assert delta.ids.count(bridge.image_token_id) == len(delta.images) == 2


def test_text_only_template_refuses_images(bridges):
    with pytest.raises(ModelError, match="cannot show images"):
        bridges("chatml").prompt([m.user("Look.", picture(1))])


def test_template_that_shows_an_image_twice_is_an_error(make_tokenizer, tokenizer_of):
    template = tokenizer_of("qwen_vl").chat_template.replace("<|image_pad|>", "<|image_pad|><|image_pad|>")
    bridge = ChatBridge(make_tokenizer(template))
    with pytest.raises(ModelError, match="2 image placeholders for 1 images"):
        bridge.prompt([m.user(picture(1))])


def test_sampled_placeholder_is_an_error_and_named_to_the_engine(bridges):
    bridge = bridges("qwen_vl")
    assert bridge.image_token_id in bridge.placeholder_token_ids
    with pytest.raises(EngineError, match="placeholder"):
        bridge.delta([m.user("x")], [bridge.image_token_id], [m.user("y")])


def test_placeholder_in_text_is_text(bridges):
    bridge = bridges("qwen_vl")
    ids = bridge.prompt(
        [m.user("<|image_pad|>", picture(1)), m.assistant("<|image_pad|>"), m.user("<image>")]
    )
    assert ids.count(bridge.image_token_id) == 1


# templates --------------------------------------------------------------------------------------------


def test_system_message_goes_into_the_first_user_message_where_the_template_has_no_role_for_it(bridges):
    bridge = bridges("gemma")
    ids = bridge.prompt([m.system("Be short."), m.user("Go."), m.user("Now.")])
    assert decode(bridge.tokenizer, ids) == (
        "<|begin_of_text|><start_of_turn>user\nBe short.\n\nGo.\nNow.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_template_that_refuses_the_messages_is_a_model_error(bridges):
    with pytest.raises(ModelError, match="roles must alternate"):
        bridges("gemma").prompt([m.assistant("I begin.")])


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("", "no chat template"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not show a user message"),
        ("{{ messages[0]['content'] }}", "does not show an assistant message"),
        ("{% if %}", "does not show a user message"),
    ],
)
def test_unusable_template_is_a_model_error(template, match, make_tokenizer):
    with pytest.raises(ModelError, match=match):
        ChatBridge(make_tokenizer(template))


def test_template_without_control_tokens_stops_at_eos_and_forks(make_tokenizer):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    bridge = ChatBridge(make_tokenizer(template))
    assert bridge.stop_token_ids == (bridge.tokenizer.eos_token_id,)
    sampled = plain(bridge.tokenizer, " 45")
    assert bridge.delta([m.user("Go.")], [*sampled, bridge.stop_token_ids[0]], [m.user("On.")]).broke
    assert not bridge.delta([m.user("Go.")], sampled, [m.user("On.")]).broke


def test_tools_go_to_a_template_that_writes_the_format(tokenizer_of):
    assert ChatAgent(tokenizer_of("qwen25"), "hermes").bridge.tools_in_template
    assert not ChatAgent(tokenizer_of("qwen25"), "lines").bridge.tools_in_template
    assert not ChatAgent(tokenizer_of("chatml"), "hermes").bridge.tools_in_template
    assert not ChatAgent(tokenizer_of("qwen25"), "hermes", instructions=False).bridge.tools_in_template
