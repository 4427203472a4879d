"""Chat stages (`chat_*`): ids, bounds, merged rows, greedy steps, answer text."""

import torch

from models.chat import Chat, greedy
from models.config import load_preprocessor_config
from models.omni import OmniModel
from models.runner import Runner
from models.sampling import TokenSet, TokenSets, penalise
from models.sampling_settings import CHAT_TEXT
from models.tokens import Tokenizer
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.tokenizer import chat_messages, chat_options


def run(golden: GoldenDir, model: OmniModel, report: Report, stem: str) -> None:
    tensors, meta = golden.tensors(stem), golden.meta(stem)
    tokenizer = Tokenizer.load(golden.checkpoint)
    sets = TokenSets.build([TokenSet(pad_id=tokenizer.special.im_end)], model.config.vocab_size)
    expected_ids = tensors["generated_ids"][0]
    length = tensors["input_ids"].shape[1] + len(expected_ids) + 8
    runner = Runner(model, sets, n_slots=2, llm_len=length)
    chat = Chat(runner, tokenizer, load_preprocessor_config(golden.checkpoint))
    messages, options = chat_messages(golden, meta["msgs"]), chat_options(meta["kwargs"])

    conversation = chat.prepare(messages, options, compat="reference")
    rows = conversation.rows
    report.equal(stem, "input ids", rows.ids, tensors["input_ids"][0])
    report.equal(stem, "image bounds", [list(b) for b in conversation.prompt.image_bounds], tensors["image_bound"])
    report.equal(stem, "audio bounds", [list(b) for b in conversation.prompt.audio_bounds], tensors["audio_bounds"])
    embeds = runner.embeddings(rows.ids)
    if rows.media is not None:
        embeds = torch.where(rows.is_row[:, None], rows.media, embeds)
    report.close(stem, "inputs_embeds", embeds[None], tensors["inputs_embeds"])

    about = meta.get("generate_kwargs", {})
    sampling = greedy(CHAT_TEXT)
    if "repetition_penalty" in about:
        sampling = type(sampling)(**{**vars(sampling), "repetition_penalty": about["repetition_penalty"]})
    with runner.lease() as slot:
        runner.state.text.configure(slot, sampling, seed=0)
        hidden, logits = runner.feed([slot], [rows])
        states, raw, scores, ids = [hidden[0][-1]], [], [], []
        for _ in expected_ids:
            raw.append(logits[0].clone())
            scores.append(penalise(logits, torch.tensor([slot]), runner.state.text, sets)[0])
            ids.append(int(runner.sample([slot], logits).ids))
            state, logits = runner.decode([slot], ids[-1:])
            states.append(state[0])
    report.equal(stem, "greedy ids", ids, expected_ids)
    report.close(stem, "logits", torch.stack(raw)[None], tensors["logits"])
    report.close(stem, "scores", torch.stack(scores)[None], tensors["scores"])
    report.close(stem, "hidden", torch.stack(states[:-1])[None], tensors["hidden"])

    special = tokenizer.special
    stop_ids = {special.im_end, special.endoftext}
    answer = chat.reply(
        messages,
        options,
        sampling=sampling,
        max_new_tokens=len(expected_ids),
        stop_ids=stop_ids,
        compat="reference",
    )
    report.equal(stem, "reply ids", answer.ids, expected_ids)
    if "answer" in meta:
        # The public code drops id 0 and shows special tokens; stop tokens and what follows speech are cut.
        shown = [i for i in answer.ids if i != 0 and i not in stop_ids]
        text = tokenizer.decode(shown, skip_special=False).split("<|tts_eos|>")[0]
        report.equal(stem, "answer", text, meta["answer"])
