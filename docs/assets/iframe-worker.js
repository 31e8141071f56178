/* A worker in a hidden frame, for pages that are opened as files: browsers allow no other there. The search of the
   theme needs one. Elsewhere the browser's own worker is used. */
if (location.protocol === "file:") {
  // By the second name the theme's worker knows that it is in a frame.
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      const loaded = new Promise(resolve => frame.addEventListener("load", resolve, { once: true }))
      frame.srcdoc = `<!doctype html><script>
        const outer = parent
        self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.body.appendChild(script)
        })), Promise.resolve())
        self.postMessage = data => outer.dispatchEvent(new CustomEvent("from-worker", { detail: { frame: window.frameElement, data } }))
      <\/script><body><script src="${url}"><\/script></body>`
      addEventListener("from-worker", event => {
        if (event.detail.frame !== frame) return
        const message = new MessageEvent("message", { data: event.detail.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      this.postMessage = data => loaded.then(() => frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
      this.terminate = () => frame.remove()
      const add = () => document.body.appendChild(frame)
      document.body ? add() : addEventListener("DOMContentLoaded", add, { once: true })
    }
  }
}
