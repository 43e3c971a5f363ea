"""Connection of the language server to an editor: pygls over the standard streams.

Modules that import torch are imported after the answer to ``initialize``, for which some editors wait 20 seconds only.
"""
import os
import sys
from typing import Any, Optional

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

import alfx


def serve(import_modules: bool) -> None:
    """Answer an editor on the standard streams until it ends the connection.

    Args:
        import_modules: import the modules that confs import, which executes user code.
    """
    output = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # what imported packages print must not get between the messages
    server = LanguageServer('alfx', alfx.__version__)

    def texts() -> dict[str, str]:
        return {document.path: document.source.replace('\r\n', '\n')
                for document in server.workspace.text_documents.values()}

    def ask(function: str, params: Any) -> Any:
        """Return the result of a function of ``answers`` for a position of an open document."""
        from alfx.language_server import answers
        document = server.workspace.get_text_document(params.text_document.uri)
        at = document.position_codec.position_from_client_units(texts()[document.path].split('\n'), params.position)
        return getattr(answers, function)(document.path, texts(), at.line, at.character)

    def range_in(document: Any, line: int, start: int, end: int) -> types.Range:
        """Return a range of columns in the units of the editor."""
        return document.range_to_client_units(types.Range(types.Position(line, start), types.Position(line, end)))

    @server.feature(types.INITIALIZED)
    def initialized(_: types.InitializedParams) -> None:
        from alfx import gin_utils
        if os.path.isdir(server.workspace.root_path or ''):
            os.chdir(server.workspace.root_path)  # confs also include files of the working directory
        gin_utils.import_configurables()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def check(_: Any) -> None:
        from alfx.language_server.problems import mistakes
        for document in server.workspace.text_documents.values():  # any of them may include the changed one
            if not document.path.endswith('.gin') and document.language_id != 'gin':
                continue
            found = [types.Diagnostic(range_in(document, *location), message, types.DiagnosticSeverity.Error,
                                      source='alfx')
                     for *location, message in mistakes(document.path, texts(), import_modules)]
            server.text_document_publish_diagnostics(
                types.PublishDiagnosticsParams(document.uri, found, document.version))

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def close(params: types.DidCloseTextDocumentParams) -> None:
        server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(params.text_document.uri, []))
        check(params)  # files that include it now include the text on disk

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> Optional[types.Hover]:
        text = ask('hover', params)
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text)) if text else None

    @server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=list('.@%/\'"(')))
    def completion(params: types.CompletionParams) -> list[types.CompletionItem]:
        document = server.workspace.get_text_document(params.text_document.uri)
        return [types.CompletionItem(
            item.name, kind=types.CompletionItemKind[item.kind], detail=item.detail,
            documentation=types.MarkupContent(types.MarkupKind.Markdown, item.meaning) if item.meaning else None,
            text_edit=types.TextEdit(types.Range(
                range_in(document, params.position.line, item.start, item.start).start, params.position), item.name))
            for item in ask('completions', params)]

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def definition(params: types.DefinitionParams) -> Optional[types.Location]:
        path, line = ask('definition', params) or ('', 0)
        start = types.Position(line, 0)
        return types.Location(uris.from_fs_path(path) or '', types.Range(start, start)) if path else None

    server.start_io(sys.stdin.buffer, output)
