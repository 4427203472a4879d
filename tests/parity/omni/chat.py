"""Chat stages (`chat_*`): ids, bounds, merged rows, greedy steps, reply text."""

import copy

import torch

from models.checkpoint.config import load_preprocessor_config
from models.inputs.audio import placeholder_groups
from models.inputs.prompts import build_prompt
from models.inputs.tokens import Tokenizer
from models.omni import OmniModel
from models.sampling.settings import CHAT_TEXT
from models.sampling.text import TokenSet, TokenSets, penalise
from models.stages.chat import Chat, greedy
from models.stages.runner import Runner
from tests.models.stages.hidden_states import record_hidden
from tests.parity.golden import GoldenDir
from tests.parity.omni.llm import HEAD
from tests.parity.omni.tokenizer import chat_messages, chat_options, missing_media
from tests.parity.report import Report

STEPS = ("generated_ids", "logits", "scores", "hidden")  # [1, steps, ...] each


def run(golden: GoldenDir, model: OmniModel, report: Report, stem: str) -> None:
    tensors, meta = golden.tensors(stem), golden.meta(stem)
    if not report.has_inputs(stem, meta, "msgs", "kwargs"):
        return
    tokenizer, settings = Tokenizer.load(golden.checkpoint), load_preprocessor_config(golden.checkpoint)
    messages, options = chat_messages(golden, meta["msgs"]), chat_options(meta["kwargs"])
    prompt = build_prompt(messages, tokenizer, settings, placeholder_groups, options)
    report.equal_if(stem, "input ids", [list(prompt.ids)], tensors.get("input_ids"))
    report.equal_if(stem, "image bounds", [list(b) for b in prompt.image_bounds], tensors.get("image_bound"))
    report.equal_if(stem, "audio bounds", [list(b) for b in prompt.audio_bounds], tensors.get("audio_bounds"))
    if missing := missing_media(golden, meta["msgs"]):
        report.fail(stem, "media", f"missing: {', '.join(missing)}")
        return
    n_steps = next((tensors[name].shape[1] for name in STEPS if name in tensors), 0)
    sets = TokenSets.build([TokenSet(pad_id=tokenizer.special.im_end)], model.config.vocab_size)
    runner = Runner(model, sets, n_slots=2, llm_len=len(prompt.ids) + n_steps + 8)
    chat = Chat(runner, tokenizer, settings)
    rows = chat.encode(prompt, compat="reference")
    embeds = model.llm.model.embed_tokens(rows.ids)
    if rows.media is not None:
        embeds[rows.is_row] = rows.media
    report.close_if(stem, "inputs_embeds", embeds[None], tensors.get("inputs_embeds"))
    if not n_steps:
        return

    about = meta.get("generate_kwargs", {})
    sampling = greedy(CHAT_TEXT)
    if "repetition_penalty" in about:
        sampling = type(sampling)(**{**vars(sampling), "repetition_penalty": about["repetition_penalty"]})
    steps = chat.steps
    with steps.lease() as slot, record_hidden(model) as hidden:
        steps.configure_text(slot, sampling, seed=0)
        raw, scores, ids = [], [], []
        for n in range(n_steps):
            before = copy.deepcopy(runner.state.text)
            (one,) = steps.step([slot], ids[-1:], [None], [True]) if n else steps.feed([slot], [rows], [True])
            raw.append(one.logits.clone())
            scores.append(penalise(one.logits[None], torch.tensor([slot]), before, sets)[0])
            ids.append(one.token)
        # Long prompts are fed in pieces, padded to a bucket.
        n_pieces, n_last = len(hidden) - n_steps + 1, (len(rows) - 1) % runner.shapes.rows[-1]
        states = [hidden[n_pieces - 1][0, n_last], *(state[0] for state in hidden[n_pieces:])]
    report.equal_if(stem, "greedy ids", [ids], tensors.get("generated_ids"))
    columns = golden.kept_rows(HEAD)
    report.close_if(stem, "logits", torch.stack(raw)[None, :, columns], tensors.get("logits"))
    report.close_if(stem, "scores", torch.stack(scores)[None, :, columns], tensors.get("scores"))
    report.close_if(stem, "hidden", torch.stack(states)[None], tensors.get("hidden"))

    special = tokenizer.special
    stop_ids = {special.im_end, special.endoftext}
    answer = chat.reply(
        messages,
        options,
        sampling=sampling,
        max_new_tokens=n_steps,
        stop_ids=stop_ids,
        compat="reference",
    )
    report.equal_if(stem, "reply ids", [answer.ids], tensors.get("generated_ids"))
    if "answer" in meta:
        # The public code drops id 0 and shows special tokens; stop tokens and what follows speech are cut.
        shown = [i for i in answer.ids if i != 0 and i not in stop_ids]
        text = tokenizer.decode(shown, skip_special=False).split("<|tts_eos|>")[0]
        report.equal(stem, "answer", text, meta["answer"])
