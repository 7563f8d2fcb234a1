"""The worker's ledger: wanted, held, refused and reported after every short sequence of events.

A worker without memory, links and threads follows the ledger. Its events are those of the table in
``aiosync.protocol.ledger``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest

from aiosync.errors import ApplyError, StaleVersion
from aiosync.protocol import Answer, Ledger
from aiosync.types import AckStatus

RECEIVED, APPLIED, NACK = AckStatus.RECEIVED, AckStatus.APPLIED, AckStatus.NACK
SKIPPED = AckStatus.SKIPPED
FINAL = {APPLIED, NACK, SKIPPED}


class Worker:
    """A worker with a waiting update, a word and a model, all of them numbers."""

    def __init__(self, *, words: bool, hook: bool) -> None:
        self.words = words  # updates lie in shared memory, and no message carries them
        self.hook = hook
        self.ledger = Ledger(awaits_hook=lambda: hook)
        self.epoch, self.version, self.now = 7, 0, 0.0
        self.knows_epoch = False  # by a message of this link, before which no word is read
        self.waiting: int | None = None
        self.word: int | None = None
        self.late: int | None = None  # a version of the word whose message is on its way
        self.unreported: list[tuple[int, ApplyError | None]] = []  # by a read in a thread
        self.had: set[tuple[int, int]] = set()
        self.refused: set[tuple[int, int]] = set()
        self.passed_on: set[tuple[int | None, int]] = set()
        self.hooks: list[tuple[int, int]] = []
        self.told: list[Answer] = []
        self.repeated: list[tuple[int, int]] = []
        self.asked: set[int] = set()  # versions of this trainer that a message asked for
        self.fetches: list[int | None] = []

    # -- events --------------------------------------------------------------------------------

    def message(self) -> None:
        """The next version arrives as a message."""
        self.version += 1
        self._arrive(self.version)

    def again(self) -> None:
        """The newest version arrives once more, as a trainer sends it that missed the answer."""
        if self.version and self.words:
            self._ask()
        elif self.version:
            self._arrive(self.version)

    def _arrive(self, version: int) -> None:
        if self._is_news(version):
            if self.waiting is not None:
                self._say(self.ledger.report(self.epoch, self.waiting, SKIPPED))
            self.waiting = version
            self._receive(version)

    def _is_news(self, version: int) -> bool:
        self.asked.add(version)
        try:
            self.ledger.arrive(self.epoch, version)
        except StaleVersion as exc:
            self.repeated.append((self.epoch, version))
            answer = self.ledger.repeat(
                self.epoch,
                version,
                exc,
                named=self.words,
                by_word=self.words,
                transforming=False,
            )
            self._say(answer)
            self._come(version)
            return False
        if self.ledger.is_fetching:
            self._come(version)
        return True

    def _receive(self, version: int) -> None:
        if not self.ledger.has_reported(self.epoch, version):
            self._say(self.ledger.report(self.epoch, version, RECEIVED))

    def word_and_message(self) -> None:
        """The word names the next version, and a message asks for it."""
        self.version += 1
        self._ask()

    def word_before_message(self) -> None:
        """The word names the next version, and a message about it is on its way."""
        self.late_message()
        self.version += 1
        self.word = self.late = self.version

    def late_message(self) -> None:
        """The message about the named version arrives; a read may have taken that version."""
        late, self.late = self.late, None
        if late is not None:
            self._ask_for(late)

    def _ask(self) -> None:
        self.late_message()
        self.word = self.version
        self._ask_for(self.version)

    def _ask_for(self, version: int) -> None:
        is_news = self._is_news(version)
        self.knows_epoch = True
        if is_news:
            older = self.ledger.owe(version, 0)
            if older:
                self._say(self.ledger.report(self.epoch, older, SKIPPED))
            self._receive(version)

    def word_alone(self) -> None:
        """The word names the next version, which the worker promised to take on this link."""
        self.version += 1
        if self.knows_epoch and self.late is None:
            self.word = self.version
        else:
            self._ask()

    def read(self) -> None:
        """A read takes what is newest."""
        self._take(None)
        self.report()

    def read_in_thread(self) -> None:
        """A read in another thread takes what is newest; the loop reports that later."""
        self._take(None)

    def report(self) -> None:
        """The loop reports what reads took."""
        while self.unreported:
            self._settle(*self.unreported.pop(0))

    def refuse(self) -> None:
        """The model refuses what is newest."""
        self._take(ApplyError("no"))
        self.report()

    def _take(self, error: ApplyError | None) -> None:
        ledger, inbox = self.ledger, self.ledger.inbox
        known = inbox.version if inbox.epoch == self.epoch else 0
        if self.words and not self.knows_epoch:
            return
        version, self.word, self.waiting = self.word or self.waiting, None, None
        if version is None:
            return
        if version <= known:
            self._say(ledger.report(self.epoch, version, SKIPPED))
            return
        promised = self.words and not self.hook
        told = not promised or ledger.owed > 0 or error is not None or ledger.is_asked
        if error is None:
            inbox.applied(self.epoch, version)
            self.had.add((self.epoch, version))
        if told:
            self.unreported.append((version, error))

    def _settle(self, version: int, error: ApplyError | None) -> None:
        self.ledger.settle(version)
        self.now += 1.0
        if error is not None:
            self.refused.add((self.epoch, version))
            self._say(self.ledger.refuse(self.epoch, version, error, self.now))
        elif self.hook:
            if self.hooks:
                self._say(self.ledger.report(*self.hooks.pop(), SKIPPED))
            self.hooks.append((self.epoch, version))
        else:
            self._say(self.ledger.report(self.epoch, version, APPLIED))
        if self.ledger.is_fetching:
            self._come(version)

    def hook_ends(self) -> None:
        """The async hook ends for the version that the model has."""
        if self.hooks:
            epoch, version = self.hooks.pop()
            self.ledger.passed_on = epoch, version
            self.passed_on.add((epoch, version))
            self._say(self.ledger.report(epoch, version, APPLIED))

    def pull(self) -> None:
        """A call asks for a version that was not sent yet."""
        self.ledger.want(self.version + 1)
        self.fetches.append(self.ledger.to_fetch)

    def pull_again(self) -> None:
        """A call asks for the newest version, which comes again if the model has let it go."""
        self.ledger.want(self.version)
        if not self.version or not self.ledger.ask_again():
            self.newest()
            return
        # Messages that the trainer sent before it heard of this come first.
        self.late_message()
        named = (self.epoch, self.version)
        told = [each.status in FINAL for each in self.told if each[:2] == named]
        assert self.ledger.announce(self.epoch, self.version)
        # The trainer sends nothing again as long as an answer is owed.
        if any(told) or self.version not in self.asked:
            self.repeated.append(named)
            before = len(self.told)
            self.again()
            assert [each.status for each in self.told[before:]] == [RECEIVED]
            self.read()
            assert self.ledger.inbox.version == self.version

    def newest(self) -> None:
        """The trainer says which version is its newest."""
        if not self.ledger.announce(self.epoch, self.version):
            self._come(self.version)

    def newest_is_on_its_way(self) -> None:
        """The trainer's word about its next version overtakes that version."""
        assert self.ledger.announce(self.epoch, self.version + 1)

    def _come(self, version: int) -> None:
        coming = self.ledger.coming
        if coming is not None and coming[0] == self.epoch and version < coming[1]:
            assert not self.ledger.has_come(self.epoch, version)
            assert self.ledger.coming == coming, "only an older version is here"
        elif self.ledger.has_come(self.epoch, version):
            self.fetches.append(self.ledger.to_fetch)

    def lose(self) -> None:
        """The link is lost, and another one takes its place."""
        self.ledger.lose_link()
        self.word, self.late, self.knows_epoch, self.asked = None, None, False, set()

    def restart(self) -> None:
        """Another trainer takes the place of this one."""
        self.report()
        self.lose()
        self.epoch, self.version = self.epoch + 1, 0
        self.waiting, self.hooks = None, []

    def replace(self) -> None:
        """The program gives the worker another model, which has no version yet."""
        self.ledger.inbox.forget()

    # -- what has to hold ----------------------------------------------------------------------

    def _say(self, answer: Answer) -> None:
        status = answer.status
        before = [each for each in self.told if each[:2] == answer[:2]]
        if answer[:2] not in self.repeated:
            if status in FINAL:
                assert not any(each.status in FINAL for each in before), "two final answers"
            else:
                assert not before, "RECEIVED comes first"
        if status is APPLIED:
            assert answer[:2] in self.had, "APPLIED, and the model never had it"
        if status is NACK:
            assert answer.error is not None
            assert answer[:2] in self.refused, "a repeated version that nothing refused"
        if self.hook and status is APPLIED:
            assert answer[:2] in self.passed_on, "the hook has not ended"
        self.told.append(answer)

    def check(self) -> None:
        """Check what holds after each event."""
        ledger, inbox = self.ledger, self.ledger.inbox
        assert inbox.newest_epoch != inbox.epoch or inbox.newest >= inbox.version
        held = ledger.held
        assert not held[1] or held in (self.passed_on if self.hook else self.had)
        told = [each for each in self.told if each.epoch == self.epoch and each.status in FINAL]
        final = {each.version for each in told} | {version for _, version in self.hooks}
        final |= {version for version, _ in self.unreported}
        for version in self.asked - {max(self.asked, default=0)}:
            assert version <= max(final, default=0), "the trainer would keep it for ever"
        refusing = ledger.refusing
        if refusing is not None:
            assert inbox.epoch != refusing.epoch or inbox.version <= refusing.version
            assert refusing.since <= self.now
        assert ledger.is_asked == bool(ledger.num_waiting or ledger.to_fetch or ledger.coming)
        assert ledger.owed <= self.version
        fetches = ledger.to_fetch is not None and ledger.coming is None
        if fetches and inbox.epoch == self.epoch and not self.unreported:
            assert ledger.to_fetch > inbox.version, "what a call wants is here"

    def check_end(self) -> None:
        """Let everything end, and check that nobody waits for an answer or a version."""
        self.late_message()
        self.report()
        if self.words:
            self.word_and_message()
        else:
            self.message()
        self.read()
        self.hook_ends()
        newest = {each.version for each in self.told if each.epoch == self.epoch}
        assert self.version in newest
        last = [each for each in self.told if each[:2] == (self.epoch, self.version)][-1]
        assert last.status is APPLIED
        assert self.ledger.held == (self.epoch, self.version)
        assert self.ledger.refusing is None
        assert self.ledger.owed == 0
        for version in self.asked:
            answers = [each for each in self.told if each[:2] == (self.epoch, version)]
            newer = [each for each in self.told if each.epoch == self.epoch]
            newer = [each for each in newer if each.version >= version and each.status in FINAL]
            assert answers
            assert newer, "an answer about a version settles all older ones"
        self.newest()
        assert self.ledger.to_fetch is None or self.ledger.to_fetch > self.version
        assert self.ledger.coming is None


EVENTS = (
    Worker.again,
    Worker.read,
    Worker.refuse,
    Worker.pull,
    Worker.newest,
    Worker.newest_is_on_its_way,
    Worker.lose,
    Worker.restart,
    Worker.replace,
    Worker.pull_again,
)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_every_short_sequence_of_events(words: bool, hook: bool) -> None:
    """Four events in all orders: 10,000 to 40,000 sequences in each of the four kinds of worker."""
    events = (Worker.word_and_message if words else Worker.message, *EVENTS)
    events += (Worker.word_before_message, Worker.late_message, Worker.read_in_thread) * words
    # A worker with an async hook promises nothing, and so each version comes with a message.
    events += (Worker.hook_ends,) if hook else (Worker.word_alone,) if words else ()
    for sequence in itertools.product(events, repeat=4):
        follow(Worker(words=words, hook=hook), sequence)


def follow(worker: Worker, sequence: Iterable[Callable[[Worker], None]]) -> None:
    """Check the ledger after each event of a sequence, and at its end."""
    sequence = list(sequence)
    try:
        for event in sequence:
            event(worker)
            worker.check()
        worker.check_end()
    except AssertionError as exc:
        names = ", ".join(event.__name__ for event in sequence)
        raise AssertionError(f"{names}: {exc}; told {worker.told}") from exc


def test_a_version_that_a_read_took_in_silence_is_asked_for_again() -> None:
    worker = Worker(words=True, hook=False)
    sequence = (Worker.word_and_message, Worker.read, Worker.word_alone, Worker.read, Worker.again)
    follow(worker, sequence)
    assert [each.status for each in worker.told[:3]] == [RECEIVED, APPLIED, APPLIED]


def test_an_answer_about_an_older_version_comes_late() -> None:
    worker = Worker(words=False, hook=True)
    sequence = (Worker.message, Worker.read, Worker.message, Worker.hook_ends, Worker.again)
    follow(worker, sequence)
    told = [(each.version, each.status) for each in worker.told[:4]]
    assert told == [(1, RECEIVED), (2, RECEIVED), (1, APPLIED), (2, RECEIVED)]


def test_the_first_of_several_refusals_has_the_time() -> None:
    ledger = Ledger()
    for version in (1, 2):
        ledger.arrive(7, version)
        ledger.refuse(7, version, ApplyError("no"), float(version))
    assert ledger.refusing is not None
    assert (ledger.refusing.version, ledger.refusing.since) == (2, 1.0)
    ledger.inbox.applied(7, 3)
    assert ledger.refusing is None
    ledger.arrive(7, 4)
    assert ledger.refuse(7, 4, ApplyError("no"), 4.0).status is NACK
    assert ledger.refusing is not None
    assert ledger.refusing.since == 4.0


def test_a_repeated_refusal_is_news() -> None:
    ledger = Ledger()
    ledger.arrive(7, 1)
    ledger.refuse(7, 1, ApplyError("no"), 1.0)
    before = ledger.refused
    ledger.has_come(7, 1)
    assert ledger.refused is not before
    assert ledger.refused is not None
    assert ledger.refused.version == 1


def test_a_transform_is_no_answer_yet() -> None:
    ledger = Ledger()
    ledger.arrive(7, 1)
    stale = StaleVersion("it came before")
    link = {"named": False, "by_word": False, "transforming": True}
    answer = ledger.repeat(7, 1, stale, **link)
    assert answer == Answer(7, 1, RECEIVED)
    assert ledger.repeat(7, 1, stale, **link) == answer


def test_only_a_version_that_a_word_names_is_owed() -> None:
    ledger = Ledger()
    ledger.arrive(7, 1)
    ledger.report(7, 1, RECEIVED)
    for named in (False, True):
        link = {"named": named, "by_word": True, "transforming": False}
        assert ledger.repeat(7, 1, StaleVersion("it came before"), **link).status is RECEIVED
        assert ledger.owed == int(named)


def test_an_announcement_reopens_only_what_was_let_go_when_it_was_asked_for() -> None:
    """The trainer, which sent version 2 meanwhile, does not send it again."""
    ledger = Ledger(awaits_hook=lambda: False)
    inbox = ledger.inbox
    for version in (1, 2):
        ledger.arrive(7, version)
        inbox.applied(7, version)
        ledger.report(7, version, APPLIED)
        inbox.forget()
        if version == 1:
            assert ledger.ask_again()
    assert not ledger.announce(7, 2)
    # So it has to be asked for that version, too.
    assert ledger.lacks_newest
    assert ledger.ask_again()
    assert ledger.announce(7, 2)
