"""The run's page as Flyte shows it: the same one, live, in the report of the driver's task."""

import asyncio
import html
from contextlib import suppress

from podium.report.page import Page
from podium.runtime._flyte.sdk import report

FRAME = '<iframe srcdoc="{page}" style="width:100%;height:95vh;border:0" title="Podium"></iframe>'
"""A page is a whole document with a content policy of its own; Flyte puts what it is given inside another."""


class LiveReport(Page):
    def _write(self) -> None:
        super()._write()
        page = self._folder.page.read_text(encoding="utf-8")
        report.current_report().get_tab("main").replace(FRAME.format(page=html.escape(page)))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the loop is over
            with suppress(Exception):  # a report that cannot be shown stops no run
                report.flush()
            return
        sending = asyncio.ensure_future(report.flush.aio(), loop=loop)
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
