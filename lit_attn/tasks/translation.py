"""Translation: label-smoothed cross-entropy, and BLEU of beam search.

Shapes: B pairs, m source tokens, n target tokens, t tokens of a translation. Targets that are
padding are IGNORED.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lit_attn.data.text.ids import IGNORED
from lit_attn.data.text.parallel import ParallelData, make_bleu, mark_unknown
from lit_attn.models.translation import EncoderDecoder
from lit_attn.tasks.beam_search import translate
from lit_attn.tasks.language import LanguageModelling, TokenLoss
from lit_attn.tasks.task import TranslationConfig


class Translation(LanguageModelling):
    """Cross-entropy per target token; loss, perplexity and BLEU of a split."""

    config: TranslationConfig
    data: ParallelData
    network: EncoderDecoder
    network_methods = ("total_loss",)
    # Beam search takes as many steps as the longest translation of a batch.
    evaluates_in_step = False

    def build_metrics(self, split: str) -> "TranslationScores":
        return TranslationScores(self.data)

    def metric_names(self, split: str) -> list[str]:
        return ["bleu", "loss", "perplexity"]

    def loss(self, batch: Any) -> Tensor:
        """Return fairseq's label-smoothed loss: a share `label_smoothing` goes to other tokens.

        Torch spreads its share over all tokens, the target included, so its share is larger.
        """
        source, inputs, targets, mean = batch
        vocabulary = len(self.network.output_weight)
        share = self.config.label_smoothing * vocabulary / (vocabulary - 1)
        return self.network.total_loss(source, inputs, targets, share) / mean.sum()

    def list_compiled(self) -> list[nn.Module]:
        """Return the encoder and the decoder; the loss works in chunks, uncompiled."""
        return [self.network.encoder, self.network.decoder]

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        source, inputs, *_ = batch
        return source, inputs

    def evaluate(self, batch: Any) -> tuple[Tensor, ...]:
        """Return -log p of every target, the targets, and translations (B, t); t may be 0."""
        nll, targets = super().evaluate(batch)
        translations = targets[:, :0]
        if self.is_translating():
            source = batch[0]
            # Each token has another length of the caches, for which compiled code compiles again.
            with torch.compiler.set_stance("force_eager"):
                rows = translate(self.network, source, self.config)
            translations = pad_sequence(
                [torch.tensor(row) for row in rows], batch_first=True, padding_value=IGNORED
            )
        return nll, targets, translations.to(targets.device)

    def is_translating(self) -> bool:
        """Return True if this evaluation measures BLEU, as every one with early stopping does."""
        has_early_stopping = bool(self.monitored)
        is_last = self.global_step >= self.trainer.max_steps
        every = self.config.translate_every
        epoch = self.global_step // self.data.steps_per_epoch
        is_due = every is not None and epoch % every == 0
        return has_early_stopping or is_last or is_due


class TranslationScores(TokenLoss):
    """Loss in nats per token, perplexity, and BLEU of the words of all translations, if any."""

    def __init__(self, data: ParallelData) -> None:
        super().__init__()
        self.data = data
        self.bleu = make_bleu()

    def update(self, nll: Tensor, targets: Tensor, translations: Tensor | None = None) -> None:
        """Add -log p (B, n), targets (B, n), and translations (B, t) of the same sentences."""
        super().update(nll, targets)
        if translations is None or not translations.shape[1]:
            return
        hypotheses: list[str] = []
        references: list[list[str]] = []
        for target, ids in zip(targets, translations, strict=True):
            target_ids = target[target != IGNORED].tolist()
            if not target_ids:
                continue
            # The last id ends the sentence.
            references.append([self.data.words(target_ids[:-1])])
            hypotheses.append(mark_unknown(self.data.words(ids[ids != IGNORED].tolist())))
        self.bleu.update(hypotheses, references)

    def compute(self) -> dict[str, Tensor]:
        values = super().compute()
        if self.bleu.update_called:
            values["bleu"] = self.bleu.compute()
        return values

    def reset(self) -> None:
        super().reset()
        self.bleu.reset()
