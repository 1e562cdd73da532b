"""Languages of real texts, short ones too, and of states with structure."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.language import detect_language, read_language

TEXTS = {
    "en": [
        "I was charged twice, please refund.",
        "Please refund the duplicate charge on invoice 4411 today.",
        "Our MI5 and UN contacts discussed the DOS attack in LA last month",
        "Please send me the café receipt.",
        "MY ORDER NEVER ARRIVED AND NOBODY ANSWERS THE PHONE",
    ],
    "de": ["ich habe mein paket noch nicht", "Der Kunde wurde zweimal belastet und möchte sein Geld zurück."],
    "es": ["El pedido llego roto y nadie responde cuando escribo al soporte"],
    "fr": ["La commande est arrivée cassée et personne ne répond au support"],
    "it": ["Il cliente è stato addebitato due volte e vuole un rimborso"],
    "pl": ["Klient został obciążony dwukrotnie i chce zwrot pieniędzy za fakturę"],
    "pt": ["O cliente foi cobrado duas vezes e quer o dinheiro de volta"],
    "ro": ["Exportă APK-ul pentru Android și pune-l pe Drive ca să-l instalez."],
    "tr": ["Müşteriden iki kez ücret alındı ve para iadesi istiyor"],
    "ru": ["Клиент требует вернуть деньги сегодня же"],
    "ar": ["تم خصم المبلغ مرتين"],
    "hi": ["मुझसे दो बार शुल्क लिया गया"],
    "hy": ["Հայերեն"],
    "ja": ["二重に請求されました"],
    "ko": ["두 번 청구되었습니다"],
    "zh": ["我这个月被重复扣款了两次，退款一直没有到账。"],
}


@pytest.mark.parametrize(("language", "text"), [(language, text) for language, some in TEXTS.items() for text in some])
def test_the_language_of_a_text_is_detected(language: str, text: str) -> None:
    found = detect_language(text)
    assert found.language == language
    assert 0.5 <= found.confidence <= 1


@pytest.mark.parametrize("state", ["", "   \n", "12345 !!! ---", "🎉🎉", None, 5, {}, [], {"a": [1, None, True]}])
def test_a_state_without_letters_has_no_language(state: Any) -> None:
    found = detect_language(state)
    assert (found.language, found.confidence) == (None, 0)


@pytest.mark.parametrize("text", ["hi", "x", "Rice", "Zzq vvb"])
def test_a_word_or_two_are_not_enough(text: str) -> None:
    found = detect_language(text)
    assert found.language is None
    assert 0 < found.confidence < 0.5


def test_a_structured_state_is_read_for_its_texts_not_for_its_keys_and_ids() -> None:
    message = {"description_of_the_problem": "ich habe mein paket noch nicht", "status": "open", "id": "T-1", "n": 3}
    assert detect_language(message).language == "de"
    assert detect_language([{"role": "user", "content": "eu não consigo entrar na minha conta"}]).language == "pt"
    assert detect_language(["user"]) == detect_language("user")


def test_one_turn_or_line_in_another_language_tells_that_the_state_is_not_english() -> None:
    english = "We are sorry to hear that, and will look into it for you as soon as we can. " * 3
    turns = [{"role": "user", "content": "oi, tudo bem? preciso de ajuda"}, {"role": "agent", "content": english}]
    for state in (turns, f"{english}\nEu nao consigo entrar na minha conta."):
        found = detect_language(state)
        assert (found.language, found.in_part) == ("pt", True)
    assert detect_language([english, "Merci!"]).language == "en"


def test_a_long_conversation_is_judged_by_its_end_and_a_long_text_by_its_start() -> None:
    english, german = "The parcel has not arrived at our house yet. " * 40, "Das Paket ist noch nicht angekommen. " * 40
    assert detect_language([english, german]).language == "de"
    assert detect_language(english + german).language == "en"


@pytest.mark.parametrize(
    ("given", "language"),
    [
        ("en", "en"),
        ("EN-us", "en"),
        ("English", "en"),
        ("eng", "en"),
        ("en_US.UTF-8", "en"),
        (" de ", "de"),
        ("zh-Hans", "zh"),
        *((nothing, None) for nothing in (None, "", "  ", "und", "C", "zxx")),
    ],
)
def test_what_a_caller_calls_a_language_is_read_leniently(given: str | None, language: str | None) -> None:
    assert read_language(given) == language


@settings(deadline=None)  # the first call loads the model
@given(st.text(max_size=80))
def test_any_text_has_an_answer_and_always_the_same(text: str) -> None:
    assert detect_language(text) == detect_language(text)


def test_half_a_surrogate_pair_harms_nothing() -> None:
    assert detect_language("\ud800 the rest of this text is plain English").language == "en"


def test_threads_share_the_detector() -> None:
    texts = [text for some in TEXTS.values() for text in some] * 50
    alone = [detect_language(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(detect_language, texts)) == alone
